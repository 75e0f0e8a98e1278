"""XLA's options as an argument of the Trainer."""

import jax
import numpy as np
import pytest
from toys import batches, make_small

from jaxdp import FSDP, Pmap, Sharded, SingleDevice

FLAG = "xla_cpu_copy_insertion_use_region_analysis"


@pytest.fixture
def compiled_with(monkeypatch):
    """The options that programs are compiled with from here on."""
    seen, compile = [], jax.stages.Lowered.compile

    def noting(lowered, options=None, **rest):
        seen.append(options)
        return compile(lowered, options, **rest)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noting)
    return seen


@pytest.mark.slow_cases("Sharded", "Pmap")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap, FSDP])
def test_steps_are_compiled_with_the_options(strategy, compiled_with):
    trainer = make_small(strategy=strategy(), compiler_options={FLAG: False})
    trainer.fit(batches(8, 8), batches(8))
    trainer.predict(batches(8))
    assert len(compiled_with) >= 3
    assert all(options[FLAG] is False for options in compiled_with)


def test_they_come_before_our_own_and_leave_those_that_keep_bits(compiled_with):
    arguments = {"accumulate_grad_batches": 2, "steps_per_execution": 2}
    trainer = make_small(
        compiler_options={"xla_disable_hlo_passes": "algsimp"}, **arguments
    )
    trainer.fit(batches(8, 8, 8, 8))
    train = compiled_with[-1]
    assert train["xla_disable_hlo_passes"] == "algsimp,while-loop-invariant-code-motion"


@pytest.mark.parametrize("options, error, text", [
    ({FLAG + "s": True}, jax.errors.JaxRuntimeError,
     f"(?s){FLAG}s.*`compiler_options` was {{'{FLAG}s': True}}"),
    ({FLAG: "perhaps"}, jax.errors.JaxRuntimeError, f"{FLAG}.*perhaps"),
    ("O9", ValueError, "`compiler_options` must be one of 'O0', 'O1', 'O2', 'O3'"),
    (3, TypeError, "`compiler_options` must be a dict or a str or None; got 3"),
])  # fmt: skip
def test_unknown_options_are_errors_before_the_first_step(options, error, text):
    with pytest.raises(error, match=text):
        make_small(compiler_options=options).fit(batches(8))


def test_a_resume_with_other_options_is_told(tmp_path, caplog):
    trainer = make_small(compiler_options={FLAG: False})
    trainer.fit(batches(8, 8))
    path = trainer.save(tmp_path / "saved")
    make_small(compiler_options={FLAG: False}).load(path)
    assert "compiler_options" not in caplog.text
    make_small().load(path)
    assert "`compiler_options` was" in caplog.text


def test_an_effort_level_changes_no_losses():
    def losses(**arguments):
        trainer = make_small(strategy=Sharded(), **arguments)
        return trainer.fit(batches(8, 8, 5), max_epochs=3)["loss"]

    np.testing.assert_allclose(losses(compiler_options="O1"), losses(), rtol=1e-6)


def test_a_strategys_own_options_are_those_of_jit():
    class Optioned(SingleDevice):
        def compile(self, *arguments, **options):
            jitted = super().compile(*arguments, **options)
            return jax.jit(jitted, compiler_options={FLAG + "s": True})

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{FLAG}s"):
        make_small(strategy=Optioned()).fit(batches(8))
