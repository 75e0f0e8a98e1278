"""A plan that does not fit names changes that need less memory."""

import equinox as eqx
import jax
import numpy as np
import pytest
from planned import batch, trainer

from jaxdp import FSDP, Sharded, Stack, fuse_attention
from jaxdp.extras.plan.hardware import HARDWARE

SMALL = HARDWARE["v5e"]._replace(memory=1000)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=key)

    def __call__(self, x, key=None):
        return x + self.attention(x, x, x)


def blocks():
    return Stack([Block(key) for key in jax.random.split(jax.random.key(0), 4)])


def test_a_plan_that_does_not_fit_names_changes_with_their_memory():
    rows = np.zeros((16, 64, 8), np.float32)
    loader, half = [(rows, rows)], [(rows[:8], rows[:8])]

    def peak(model=None, strategy=None, loader=loader, **options):
        changed = trainer(
            strategy or Sharded(8), model or blocks(), loss="mse", **options
        )
        return changed.plan(loader).memory.peak

    accumulated = peak(loader=half, accumulate_grad_batches=2)
    peaks = {
        "`Trainer(remat=True)`": peak(remat=True),
        "`fuse_attention(model)`": peak(fuse_attention(blocks())),
        "`strategy=FSDP()`": peak(strategy=FSDP(8)),
        "batches of 8 rows, and `accumulate_grad_batches=2`": accumulated,
    }
    lowest = sorted(peaks.items(), key=lambda item: item[1])[:3]

    small = SMALL._replace(memory=lowest[0][1])
    plan = trainer(Sharded(8), blocks(), loss="mse").plan(loader, hardware=small)
    assert [(found.change, found.peak) for found in plan.remedies] == lowest
    assert [found.fits for found in plan.remedies] == [True, False, False]
    assert plan.fits is False and "does not fit" in repr(plan)
    assert "The peak does NOT fit into the" in str(plan)
    assert lowest[0][0] in str(plan) and "<pre>Plan for" in plan._repr_html_()
    found = plan.to_dict()
    assert found["fits"] is False and found["remedies"][0]["peak"] == lowest[0][1]


@pytest.mark.parametrize(("hardware", "fits"), [("v5e", True), (None, None)])
def test_a_plan_that_fits_names_none(hardware, fits):
    plan = trainer().plan([batch()], hardware=hardware)
    assert plan.fits is fits and plan.remedies == ()


def test_changes_that_cannot_be_are_not_named():
    plan = trainer(FSDP(8)).plan([batch(1)], hardware=SMALL)
    assert plan.fits is False and plan.remedies == ()


def test_changes_that_the_code_of_the_user_does_not_take_are_not_named():
    def loss_fn(model, x, y):
        outputs = jax.vmap(model)(x.reshape(16, -1))  # of one size of batch
        return ((outputs - y.reshape(16, 1)) ** 2).mean()

    made = trainer(Sharded(8), loss=None, loss_fn=loss_fn)
    plan = made.plan([batch(16)], hardware=SMALL)
    changes = [remedy.change for remedy in plan.remedies]
    assert plan.fits is False and not any("batches of" in each for each in changes)
