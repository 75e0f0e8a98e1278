"""A plan that does not fit names changes that need less memory."""

import equinox as eqx
import jax
import numpy as np
import pytest
from planned import batch, card, plan

from jaxdp import FSDP, Sharded, Stack, fuse_attention

SMALL = card("TPU v5 lite")._replace(memory=1000)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __call__(self, x, key=None):
        return x + self.attention(x, x, x)


def blocks():
    keys = jax.random.split(jax.random.key(0), 4)
    return Stack([Block(eqx.nn.MultiheadAttention(2, 8, key=key)) for key in keys])


def test_a_plan_that_does_not_fit_names_changes_with_their_memory():
    x = np.zeros((16, 64, 8), np.float32)
    here = {"strategy": Sharded(8), "loader": [(x, x)], "model": blocks()}
    half = {"loader": [(x[:8], x[:8])], "accumulate_grad_batches": 2}
    changes = {
        "`Trainer(remat=True)`": {"remat": True},
        "`fuse_attention(model)`": {"model": fuse_attention(blocks())},
        "`strategy=FSDP()`": {"strategy": FSDP(8)},
        "batches of 8 rows, and `accumulate_grad_batches=2`": half,
    }
    peaks = [
        (change, plan(**{**here, "loss": "mse", **options}).memory.peak)
        for change, options in changes.items()
    ]
    lowest = sorted(peaks, key=lambda item: item[1])[:3]

    small = SMALL._replace(memory=lowest[0][1])
    found = plan(**here, loss="mse", hardware=small)
    assert [(each.change, each.peak) for each in found.remedies] == lowest
    assert [each.fits for each in found.remedies] == [True, False, False]
    assert found.fits is False and "does not fit" in repr(found)
    assert "The peak does NOT fit into the" in str(found)
    assert lowest[0][0] in str(found) and "<pre>Plan for" in found._repr_html_()
    values = found.to_dict()
    assert values["fits"] is False and values["remedies"][0]["peak"] == lowest[0][1]


def of_one_size(model, x, y):
    outputs = jax.vmap(model)(x.reshape(16, -1))
    return ((outputs - y.reshape(16, 1)) ** 2).mean()


@pytest.mark.parametrize("options, fits, named", [
    ({"hardware": "v5e"}, True, []),
    ({"hardware": None}, None, []),
    ({"strategy": FSDP(8), "loader": [batch(1)]}, False, []),
    # The user's code takes no other batch.
    ({"loader": [batch(16)], "loss": None, "loss_fn": of_one_size}, False,
     ["`strategy=FSDP()`"]),
])  # fmt: skip
def test_changes_that_are_not_needed_or_cannot_be_are_not_named(options, fits, named):
    found = plan(**{"hardware": SMALL, **options})
    assert found.fits is fits
    assert [remedy.change for remedy in found.remedies] == named
