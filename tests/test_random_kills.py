"""Runs of random arguments, killed at random moments and resumed, end as in one go."""

import contextlib
import csv
import shutil
import tempfile
import warnings

import equinox as eqx
import jax
import optax
import pytest
from toys import Mlp, NormNet, batches, quiet, rows
from twins import outcome

from jaxdp import FSDP, Arrays, Callback, Sharded, SingleDevice, ZeRO
from jaxdp.callbacks import (
    CSVLogger,
    EarlyStopping,
    GradientMonitor,
    ModelCheckpoint,
    NanGuard,
    ReduceLROnPlateau,
    WeightAveraging,
)

hypothesis = pytest.importorskip("hypothesis")
draw = hypothesis.strategies

X, Y = rows(29)
STEPS = 4
"""Batches of an epoch."""


class Unsized:
    """The batches of an epoch, without their number."""

    def __iter__(self):
        return iter(batches(8, 8, 8, 5))


LOADERS = {
    "list": lambda: batches(8, 8, 8, 5),
    "unsized": Unsized,
    "arrays": lambda: Arrays(X, Y, batch_size=8, shuffle=True),
}
SAVERS = [
    {"every_n_train_steps": 1, "save_top_k": -1},
    {"every_n_train_steps": 3},
    {"every_n_epochs": 2},
    {"monitor": "val_loss", "save_top_k": 2},
    {"monitor": "loss"},
    {"every_n_train_steps": 2, "save_on_exception": True},
]
CALLBACKS = {
    "stopping": lambda: EarlyStopping("val_loss", patience=1, restore_best=True),
    "plateau": lambda: ReduceLROnPlateau("loss", patience=0, min_delta=0.01),
    "average": lambda: WeightAveraging(0.9),
    "norms": GradientMonitor,
    "guard": lambda: NanGuard("skip"),
}
STRATEGIES = [SingleDevice(), Sharded(2), FSDP(2, min_size=1), ZeRO(devices=2)]
HOOKS = [
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
]
RUNS = draw.fixed_dictionaries({
    "has_state": draw.booleans(),
    "loader": draw.sampled_from(sorted(LOADERS)),
    "saver": draw.sampled_from(SAVERS),
    "callbacks": draw.sets(draw.sampled_from(sorted(CALLBACKS)), max_size=3),
    "trainer": draw.fixed_dictionaries({
        "strategy": draw.sampled_from(STRATEGIES),
        "precision": draw.sampled_from(["32-true", "bf16-mixed", "16-mixed"]),
        "accumulate_grad_batches": draw.integers(1, 3),
        "steps_per_execution": draw.integers(1, 3),
        "log_every_n_steps": draw.sampled_from([1, 3]),
        "seed": draw.integers(0, 3),
    }),
    "fit": draw.fixed_dictionaries(
        {"max_epochs": draw.integers(1, 4)},
        optional={
            "max_steps": draw.integers(2, 12),
            "limit_train_batches": draw.integers(2, 3),
            "val_check_interval": draw.integers(1, 2),
            "min_epochs": draw.just(1),
        },
    ),
    "kills": draw.lists(
        draw.tuples(draw.sampled_from(HOOKS), draw.integers(1, 9)),
        min_size=1, max_size=3,
    ),
})  # fmt: skip


class Killed(Exception):
    pass


def make_kill(hook, step):
    """Returns a callback that raises in a hook, from a step on."""

    def kill(self, trainer, *_):
        if trainer.global_step >= step:
            raise Killed

    return type("Kill", (Callback,), {hook: kill})()


def train(folder, run, *kills):
    """Returns what a run is after a fit, which resumes if there is a checkpoint."""
    model, state = Mlp(jax.random.key(0)), None
    if run["has_state"]:
        model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    trainer = quiet(
        model,
        optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
        loss="cross_entropy",
        state=state,
        callbacks=[
            *(CALLBACKS[name]() for name in sorted(run["callbacks"])),
            ModelCheckpoint(f"{folder}/steps", **run["saver"]),
            CSVLogger(f"{folder}/log"),
            *kills,
        ],
        **run["trainer"],
    )
    loader = LOADERS[run["loader"]]()
    trainer.fit(loader, batches(8, 5, seed=1), ckpt_path="auto", **run["fit"])
    with open(f"{folder}/log/metrics.csv") as file:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    return outcome(trainer) | {"rows": rows}


def check_kills(run):
    if run["saver"].get("save_on_exception"):
        # That checkpoint says that the epoch is over, and its last hooks did not run.
        hooks = {hook for hook, _ in run["kills"]}
        hypothesis.assume("on_train_epoch_end" not in hooks)
        # It has the steps of a whole call, and not what hooks would add to their rows.
        is_alone = run["trainer"]["steps_per_execution"] == 1
        hypothesis.assume(is_alone or "norms" not in run["callbacks"])
    folder = tempfile.mkdtemp()
    try:
        with warnings.catch_warnings(record=True) as caught:  # odd arguments, too
            warnings.simplefilter("always")
            expected = train(f"{folder}/whole", run)
            for kill in run["kills"]:
                with contextlib.suppress(Killed):
                    train(f"{folder}/killed", run, make_kill(*kill))
            found = train(f"{folder}/killed", run)
    finally:
        shutil.rmtree(folder)
    # A resumed run whose best weights no checkpoint has warns, and ends with its last
    # ones. These savers keep all checkpoints, or that of the best check.
    saver = run["saver"]
    keeps_best = saver.get("save_top_k") == -1 or saver.get("monitor") == "val_loss"
    ends_with_last = any(
        "ends with its last ones" in str(each.message) for each in caught
    )
    hypothesis.assume(keeps_best or not ends_with_last)
    for name, value in expected.items():
        assert found[name] == value, name


def settings(max_examples):
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate  # runs take a second
    return hypothesis.settings(
        deadline=None, database=None, derandomize=True, phases=phases,
        suppress_health_check=[*hypothesis.HealthCheck], max_examples=max_examples,
    )  # fmt: skip


@settings(3)
@hypothesis.given(RUNS)
def test_some_killed_runs_end_as_in_one_go(run):
    check_kills(run)


@pytest.mark.slow
@settings(100)
@hypothesis.given(RUNS)
def test_many_killed_runs_end_as_in_one_go(run):
    check_kills(run)
