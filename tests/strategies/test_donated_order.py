"""The state comes first in what a step takes and returns, each array in its place.

JAX on CUDA gives wrong numbers where donated arrays come back in another order than
they went in: https://github.com/jax-ml/jax/issues/39625, open as of November 2026. So
no array of the state may become another one of the same shape. (The doctor tries both
orders on the device that is there.)
"""

import pytest
from toys import batches, make_small

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, ZeRO
from jaxdp.basics.donation import parse_aliases


@pytest.mark.slow_but("1-SingleDevice", "1-Sharded", "2-Sharded")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap, ZeRO, FSDP])
@pytest.mark.parametrize("steps", [1, 2])
def test_each_donated_array_comes_back_in_its_own_place(strategy, steps):
    trainer = make_small(strategy=strategy(), steps_per_execution=steps)
    trainer.fit(batches(16, 16))
    compiled = trainer.compiled_train_step()
    header = compiled.as_text().partition("\n")[0]
    kept = sorted(compiled._executable._kept_var_idx)
    pairs = parse_aliases(header)
    assert len(pairs) >= 12  # parameters and the moments of Adam
    for parameter, result in pairs.items():
        assert int(result) == kept[parameter]
