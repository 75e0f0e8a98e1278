"""Errors for steps without enough memory, and the state after them."""

import types

import jax
import pytest
from toys import batches, make_small

from jaxdp import SingleDevice
from jaxdp.basics.hardware import get_smallest_memory
from jaxdp.engine.in_flight import InFlightQueue
from jaxdp.engine.out_of_memory import check_program

SAID = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."
REMEDIES = (
    r"a smaller `batch_size`.* `accumulate_grad_batches=2`.* `remat=True`"
    r".* `strategy=FSDP\(\)`.*largest_batch"
)


class Short(SingleDevice):
    """A strategy whose steps of one kind raise JAX's error for memory."""

    def __init__(self, results, text=SAID):
        super().__init__()
        self._results, self._text = results, text

    def compile(self, step, arguments, roles, results, **options):
        compiled = super().compile(step, arguments, roles, results, **options)

        def fails(*given):
            raise jax.errors.JaxRuntimeError(self._text)

        return fails if results == self._results else compiled


KINDS = {
    "training": ("state", "replicated"),
    "validation": ("replicated", "replicated"),
    "prediction": "rows",
}


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_memory_have_remedies(kind):
    trainer = make_small(strategy=Short(KINDS[kind]))
    data = batches(8, 8)
    act = {
        "training": lambda: trainer.fit(data),
        "validation": lambda: trainer.validate(data),
        "prediction": lambda: trainer.predict(data),
    }
    text = f"the {kind} step does not fit.*{REMEDIES}.*JAX says: .* 12.50GiB"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as caught:
        act[kind]()
    assert "The state is as it was before the step." in str(caught.value)
    assert str(caught.value.__cause__) == SAID
    assert trainer.state.params.layers[0].weight.shape == (8, 4)  # still there


def test_other_errors_of_a_step_are_not_changed():
    trainer = make_small(strategy=Short(KINDS["training"], "INTERNAL: a bad day"))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="INTERNAL: a bad day"
    ) as caught:
        trainer.fit(batches(8, 8))
    assert str(caught.value) == "INTERNAL: a bad day"


def program(arguments, results, overwritten, temporary):
    analysis = types.SimpleNamespace(
        argument_size_in_bytes=arguments,
        output_size_in_bytes=results,
        alias_size_in_bytes=overwritten,
        temp_size_in_bytes=temporary,
    )
    return types.SimpleNamespace(memory_analysis=lambda: analysis)


def on_cards(*limits):
    """Returns an array on devices with these memory limits."""
    devices = [
        types.SimpleNamespace(
            process_index=0, memory_stats=lambda limit=limit: {"bytes_limit": limit}
        )
        for limit in limits
    ]
    sharding = types.SimpleNamespace(device_set=devices)
    return [types.SimpleNamespace(sharding=sharding, is_deleted=lambda: False)]


def test_a_step_without_enough_memory_is_refused_before_it_runs():
    def check(compiled, *limits):
        check_program("the training step", on_cards(*limits), 256, compiled)

    step = program(40 * 10**9, 30 * 10**9, 29 * 10**9, 20 * 10**9)
    check(step, 62 * 10**9, 70 * 10**9)
    check(step)  # devices that report no limit
    check(lambda: None, 1)  # programs that report no memory
    assert get_smallest_memory(jax.devices()) is None
    text = (
        "training step needs 61 GB .* gives programs 60 GB; 20 GB are temporary.*"
        f"256 rows.*{REMEDIES}.*Nothing was computed, and the state is as it was"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        check(step, 60 * 10**9, 70 * 10**9)


def test_a_batch_without_enough_memory_keeps_the_state():
    class NoRoom(SingleDevice):
        full = False

        def compile(self, *arguments, **options):
            step = super().compile(*arguments, **options)

            def call(*inputs):
                if self.full:
                    raise jax.errors.JaxRuntimeError(SAID)
                return step(*inputs)

            return call

    strategy = NoRoom()
    trainer = make_small(strategy=strategy)
    trainer.fit(batches(8, 8))
    strategy.full = True
    for act in (
        lambda: trainer.fit(batches(8, 8), max_epochs=2),
        lambda: trainer.validate(batches(8, 8)),
        lambda: trainer.predict(batches(8, 8)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=REMEDIES) as caught:
            act()
        assert "The state is as it was before the step." in str(caught.value)
    strategy.full = False
    assert trainer.fit(batches(8, 8), max_epochs=2).epochs == [0, 1]


def test_an_earlier_step_without_enough_memory_has_remedies():
    def finds_no_memory(array):
        raise jax.errors.JaxRuntimeError(SAID)

    in_flight = InFlightQueue()
    in_flight.wait = finds_no_memory
    with pytest.raises(jax.errors.JaxRuntimeError, match=REMEDIES) as caught:
        for _ in range(20):
            in_flight.add(jax.numpy.zeros(1), 0)
    assert "an earlier step does not fit" in str(caught.value)
    assert "The state is lost with the step: load the last" in str(caught.value)
    assert str(caught.value.__cause__) == SAID
