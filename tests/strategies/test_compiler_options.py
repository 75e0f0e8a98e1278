"""XLA's options as an argument of the Trainer."""

import jax
import numpy as np
import pytest
from toys import batches, make_small

from jaxdp import FSDP, Pmap, Sharded, SingleDevice
from jaxdp.engine.xla_options import check_options

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


def test_no_options_are_none_of_ours():
    assert make_small().run.config.compiler_options == {}
    assert make_small(compiler_options={}).run.config.compiler_options == {}


def test_levels_are_spelled_as_this_version_has_them():
    ((name, value),) = check_options("O1").items()
    assert name == "optimization_level"
    jax.jit(lambda: 0).lower().compile({name: value})
    assert check_options({"optimization_level": "O1"}) == {name: value}
    assert check_options({"--" + FLAG: True}) == {FLAG: True}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({FLAG + "s": True}, ValueError, f"does not take '{FLAG}s'=True.*{FLAG}"),
        ({FLAG: "perhaps"}, ValueError, "does not take.*'perhaps'.*not a valid bool"),
        ({"nothing_like_it": 1}, ValueError, "No such compile option"),
        ("O9", ValueError, "must be one of 'O0', 'O1', 'O2', 'O3', or a dict"),
        (3, TypeError, "must be a dict or a str or None; got 3"),
        ({3: 3}, TypeError, r"must be a dict of XLA's options by name.*\{3: 3\}"),
    ],
)
def test_what_xla_does_not_know_is_refused_at_once(options, error, text):
    with pytest.raises(error, match=f"`compiler_options`.*{text}"):
        make_small(compiler_options=options)


def test_options_for_tpus_are_left_to_their_compiler():
    options = {"xla_tpu_scoped_vmem_limit_kib": 98304}
    assert make_small(compiler_options=options).run.config.compiler_options == options


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
