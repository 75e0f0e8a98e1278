"""The commands, as a shell runs them, and what the doctor finds."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import assert_close, batches, fail_with, mlp_trainer, read_table

from jaxdp import load_model
from jaxdp.callbacks import CSVLogger
from jaxdp.extras import cli


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def runs(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        logger = CSVLogger(tmp_path / name, hyperparameters={"mine": name})
        trainer = mlp_trainer(logger, seed=seed)
        trainer.fit(batches(*[8] * 4), batches(8), max_epochs=1 + seed)
    return tmp_path / "a", tmp_path / "b" / "metrics.csv"


def test_no_command_shows_the_help_which_names_every_command(capsys):
    code, out, _ = run(capsys)
    assert code == 2 and "usage: jaxdp" in out
    for command in ("doctor", "plan", "report", "compare", "export"):
        assert f"\n    {command} " in out


def test_report_writes_a_page_into_the_run(capsys, runs):
    folder, table = runs
    code, out, _ = run(capsys, "report", folder)
    assert code == 0 and out.strip() == str(folder / "report.html")
    assert "<svg" in (folder / "report.html").read_text()
    run(capsys, "report", table, "-o", folder / "x")
    assert (folder / "x").exists()


def test_compare_prints_what_is_best_and_what_differs(capsys, runs):
    code, out, _ = run(capsys, "compare", *runs)
    assert code == 0
    rows = (re.split(r"  +", line.strip()) for line in out.splitlines() if line)
    rows = {name: values for name, *values in rows}
    assert rows["steps"] == ["4", "8"] and rows["epochs"] == ["1", "2"]
    assert rows["status"] == ["finished"] * 2
    tables = [read_table(path) for path in runs]
    best = [min(float(x["val_loss"]) for x in t if x["val_loss"]) for t in tables]
    marked = [text.endswith(" *") for text in rows["val_loss, best"]]
    assert marked == [value == min(best) for value in best]
    accuracy = [float(table[-1]["epoch_accuracy"]) for table in tables]
    marked = [text.endswith(" *") for text in rows["accuracy, last epoch"]]
    assert marked == [value == max(accuracy) for value in accuracy]
    assert rows["mine"] == ["a", "b"] and rows["seed"] == ["0", "1"]
    assert "model" not in rows


SCRIPT = """
import sys
import equinox as eqx, jax, numpy as np
from jaxdp import Sharded, Trainer
from neighbour import WIDTH

assert sys.argv[1:] == ["--fast", "1"], sys.argv
assert __name__ == "__main__"
model = eqx.nn.MLP(4, 3, WIDTH, 1, key=jax.random.key(0))
trainer = Trainer(model, loss="cross_entropy", strategy=Sharded(2))
x, y = np.zeros((16, 4), np.float32), np.zeros(16, np.int32)
try:
    list(trainer.{call}([(x, y)]))
except ValueError:
    pass
raise AssertionError("it trained")
"""


@pytest.mark.slow_cases("fit")
@pytest.mark.parametrize("call", ["fit", "steps"])
def test_plan_stops_a_script_where_it_would_train(capsys, tmp_path, call):
    (tmp_path / "neighbour.py").write_text("WIDTH = 16\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{call}", call))
    before = list(sys.argv), list(sys.path)
    sys.modules.pop("neighbour", None)
    options = ["plan", "--devices", 4, "--json", tmp_path / "p.json"]
    code, out, _ = run(capsys, *options, script, "--fast", "1")
    assert code == 0 and "4" in out
    plan = json.loads((tmp_path / "p.json").read_text())
    assert plan
    assert (list(sys.argv), list(sys.path)) == before
    mlp_trainer().fit(batches(8))  # `fit` is itself again


@pytest.mark.parametrize("arguments, message", [
    (["plan", "a.py"], "ended without a call of `Trainer.fit`"),
    (["plan", "missing.py"], "there is no such file"),
    (["report", "missing"], "is not a run: a run is"),
    (["export", "missing", "w.pt"], "must end with .safetensors or .npz"),
    (["export", "missing", "w.npz"], "missing"),
])  # fmt: skip
def test_errors_are_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("print(1)")
    code, _, err = run(capsys, *arguments)
    assert code == 1 and err.startswith("jaxdp: ") and message in err
    assert err.count("\n") == 1
    monkeypatch.setenv("JAXDP_TRACEBACK", "1")
    with pytest.raises((OSError, ValueError), match=message):
        run(capsys, *arguments)


def test_what_is_not_the_plans_own_is_the_scripts(capsys, tmp_path):
    script = tmp_path / "a.py"
    script.write_text("import sys; print(sys.argv[1:])")
    own = ["--dev", "1", "b"], ["--devices", "8"]
    _, out, _ = run(capsys, "plan", script, *own[0], "--devices", 4, "--", *own[1])
    assert out.strip() == str(own[0] + own[1])
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "doctor", "--slow")
    assert "unrecognized arguments: --slow" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["w.npz", "w.safetensors"])
def test_export_writes_the_arrays_of_a_checkpoint(capsys, tmp_path, file):
    trainer = mlp_trainer()
    trainer.fit(batches(8, 8))
    trainer.save(str(tmp_path / "saved"))
    if file.endswith("npz"):
        load = np.load
    else:
        load = pytest.importorskip("safetensors.numpy").load_file
    code, out, _ = run(capsys, "export", tmp_path / "saved", tmp_path / file)
    assert code == 0 and "6 arrays" in out
    arrays = load(tmp_path / file)
    assert len(arrays) == 6
    for place, layer in enumerate(trainer.model.layers):
        for name in ("weight", "bias"):
            array = arrays[f"layers[{place}].{name}"]
            np.testing.assert_array_equal(array, getattr(layer, name), strict=True)
    if file.endswith("safetensors"):
        loaded = load_model(tmp_path / file, trainer.model)
        assert_close(loaded, trainer.model, 0, 0)


def test_the_doctor_finds_this_machine_able(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "PROBLEM" not in out
    for what in (
        f"jax {jax.__version__}",
        "(cpu)",
        "a product agrees with NumPy's",
        "random numbers are finite",
        "overwritten rightly, swapped",
        "a scatter-add of 40,960 rows takes",
        "arrays are computed in float32",
        "pinned_host memory and back",
    ):
        assert what in out


def test_the_doctor_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr("glob.glob", lambda file: [file] if "nvidia" in file else [])
    for own, remedy in ("cpu", "unset JAX_PLATFORMS"), ("", "docs/install.md"):
        monkeypatch.setenv("JAX_PLATFORMS", own)
        code, out, _ = run(capsys, "doctor")
        assert code == 1 and out.count("PROBLEM") == 1 and remedy in out
        assert "there is a NVIDIA GPU, and JAX does not use it" in out


def test_the_doctor_tells_wrong_numbers_and_errors(monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", fail_with(MemoryError("no room")))
    monkeypatch.setattr(jnp, "isfinite", jnp.isnan)
    code, out, _ = run(capsys, "doctor")
    failing, comparing = re.findall("^PROBLEM.*", out, re.M)
    assert code == 1
    assert failing.endswith("  looking for devices: MemoryError: no room")
    assert comparing.endswith("  not so: random numbers are finite")
    assert "-> wrong numbers" in out
