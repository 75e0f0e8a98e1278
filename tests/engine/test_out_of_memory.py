"""Errors for steps without enough memory, and the state after them."""

import jax
import pytest
from toys import On, batches, fail_with, make_small

from jaxdp import Sharded, SingleDevice

SAID = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."
REMEDIES = (
    r"a smaller `batch_size`.* `accumulate_grad_batches=2`.* `remat=True`"
    r".* `strategy=FSDP\(\)`.*largest_batch"
)
DATA = batches(8, 8)


def fail(trainer, kind, text, overwrites=False):
    """Makes the compiled steps of a kind raise JAX's error."""

    def raise_error(leaves, *others):
        if overwrites:
            leaves[0].delete()
        raise jax.errors.JaxRuntimeError(text)

    for program in trainer.run.engine.compiled_steps[kind].programs.values():
        program.compiled, program.is_compiled = raise_error, False


USES = {
    "training": ("train", lambda trainer: trainer.fit(DATA, max_epochs=2)),
    "validation": ("evaluate", lambda trainer: trainer.validate(DATA)),
    "prediction": ("predict", lambda trainer: trainer.predict(DATA)),
}


@pytest.mark.parametrize("name", USES)
def test_errors_of_memory_have_remedies_and_keep_the_state(name):
    kind, use = USES[name]
    trainer = make_small()
    trainer.fit(DATA, DATA)
    trainer.predict(DATA)
    fail(trainer, kind, SAID)
    text = f"the {name} step does not fit.*{REMEDIES}.*JAX says: .* 12.50GiB"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as caught:
        use(trainer)
    assert str(caught.value.__cause__) == SAID
    fail(trainer, kind, "INTERNAL: a bad day")  # no error of memory
    with pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL: a bad day"):
        use(trainer)
    trainer.run.engine.compiled_steps[kind].programs.clear()
    assert trainer.fit(DATA, max_epochs=2).epochs == [0, 1]


def test_a_step_without_enough_memory_is_refused_before_it_runs():
    trainer = make_small()
    trainer.run.engine.memory = 10**3
    text = rf"training step needs .* has 1(\.000)? kB; .* 8 rows.*{REMEDIES}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        trainer.fit(DATA)
    assert trainer.global_step == 0

    trainer.run.engine.memory = 10**9
    trainer.fit(batches(4))  # which is not padded to the size of the larger batch
    assert trainer.run.engine.compiled_steps["train"].packer.size == 4


@pytest.mark.parametrize("name", USES)
def test_a_step_without_enough_memory_is_refused_each_time(name):
    trainer = make_small()
    trainer.run.engine.memory = 100
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"the {name} step needs"):
            USES[name][1](trainer)


def test_a_state_that_a_failed_step_has_overwritten_is_lost():
    trainer = make_small()
    trainer.fit(DATA)
    fail(trainer, "train", "INTERNAL: a bad day", overwrites=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bad day"):
        trainer.fit(DATA, max_epochs=2)
    for use in (USES["training"][1], USES["validation"][1], lambda used: used.model):
        with pytest.raises(RuntimeError, match="the state is lost.*ckpt_path"):
            use(trainer)


def test_an_earlier_step_without_enough_memory_has_remedies():
    def fill(trainer):
        error = jax.errors.JaxRuntimeError(SAID)
        trainer.run.engine.in_flight.wait = fail_with(error)

    trainer = make_small(callbacks=[On(on_train_epoch_start=fill)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=REMEDIES) as caught:
        trainer.fit(DATA * 10)
    assert "an earlier step does not fit" in str(caught.value)
    assert str(caught.value.__cause__) == SAID


def test_the_smallest_device_limits_the_memory(monkeypatch):
    limits = {0: {"bytes_limit": 10**9}, 1: {"bytes_limit": 1000}}
    kind, get_stats = type(jax.devices()[0]), lambda device: limits.get(device.id)
    monkeypatch.setattr(kind, "memory_stats", get_stats)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"has 1(\.000)? kB"):
        make_small(strategy=Sharded(3)).fit(DATA)
    make_small(strategy=SingleDevice()).fit(DATA)
