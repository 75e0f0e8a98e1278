"""States of random generators: kept as JSON, and refused where they are none."""

import json
import random

import equinox as eqx
import jax
import numpy as np
import pytest
from toys import rows

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from jaxdp import Trainer  # noqa: E402
from jaxdp.checkpoint import CheckpointCorrupt, read_meta, seal  # noqa: E402
from jaxdp.checkpoint.metadata import digest  # noqa: E402
from jaxdp.data.random_states import (  # noqa: E402
    FORM,
    Generators,
    set_states,
    states_of,
)
from jaxdp.data.source import ALL  # noqa: E402

X, Y = rows(24)
DATA = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def draw(generator, count):
    return int(torch.randint(count, (), generator=generator))


def test_states_of_generators_survive_json():
    parts = {"a": torch.Generator().manual_seed(3)}
    draw(parts["a"], 10)
    saved = json.loads(json.dumps(states_of(parts)))
    expected = [draw(parts["a"], 10**6) for _ in range(700)]
    FORM(saved, "saved")
    set_states(parts, saved)
    assert [draw(parts["a"], 10**6) for _ in range(700)] == expected


@pytest.mark.parametrize("of", [None, True, 2**200, 1.5, "", "x", "AAAA", [], {}])
def test_forged_states_are_refused_and_none_is_set(of):
    parts = {name: torch.Generator().manual_seed(3) for name in "ab"}
    before = states_of(parts)
    draw(parts["a"], 5)
    now = states_of(parts)
    forged = {"a": before["a"], "b": before["b"] | {"state": of}}
    with pytest.raises(ValueError, match="'b' can't be loaded"):
        set_states(parts, forged)
    assert states_of(parts) == now


FORGERIES = {
    "source": [5, "x", {"generators": 5}, {"generators": {"a": 5}}, {"lists": [1]}],
    "place": [
        {"batches": 1},
        {"batches": -1, "state": {}, "generators": None, "after": 1},
        {"batches": 1, "state": {"__jaxdp__": "array"}, "generators": 0, "after": 1},
        {"lists": [1, "x"]},
    ],
    "validation": [
        {"own": {"__jaxdp__": "number", "of": 5, "as": []}},
        {"samplers": 1},
    ],
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_state_of_a_loader_is_refused_at_load(tmp_path, name):
    """What comes of each process, too; and before anything is replaced."""
    model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    trainer = Trainer(model, loss="cross_entropy", enable_progress_bar=False)
    trainer.fit(DataLoader(DATA, 6), max_steps=2)
    progress = trainer.run.progress
    saved = progress.state_dict(ALL)
    for forgery in FORGERIES[name]:
        for value in forgery, {"by_process": [None, forgery]}, {"of_each": [forgery]}:
            with pytest.raises(ValueError, match=name):
                progress.check({**saved, name: value})
    progress.check(json.loads(json.dumps(saved)))
    before = trainer.save(tmp_path / "whole")
    meta = {**read_meta(before), name: FORGERIES[name][0]}
    meta["digest"] = digest(meta)
    (tmp_path / "whole" / "meta" / "metadata").write_text(json.dumps(meta))
    seal.write_list(before)
    with pytest.raises(CheckpointCorrupt, match=name):
        trainer.load(before)


def test_forged_states_of_the_global_generators_change_none():
    import torch

    def present():
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    torchs, (kind, keys, place, gauss, cached), pythons = present()
    for forged in (
        None,
        {},
        (),
        (torchs[:-1],),
        (torchs, (kind, keys, 10**6, gauss, cached), pythons),
        (torchs, (kind, keys[:9], 5, gauss, cached), pythons),
        (torchs, (kind, keys, place, 7, cached), pythons),
        (torchs, "x", pythons),
        (torchs, (kind, keys, place, gauss, cached), (3, (1, 2), None)),
    ):
        before = repr(present())
        with pytest.raises(ValueError, match="can't be loaded"):
            Generators().go_on_from(forged)
        assert repr(present()) == before
    generators = Generators()
    generators.go_on_from((torchs, (kind, keys, place, gauss, cached), pythons))
    with generators.active():
        first = random.random(), np.random.rand(), torch.rand(())
    random.setstate(pythons)
    assert first[0] == random.random()
