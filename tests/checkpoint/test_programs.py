"""Compiled steps beside checkpoints: who may load them, and when they fit."""

import contextlib
import hashlib
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from toys import Mlp, batches

import jaxdp
from jaxdp import Sharded, SingleDevice, Trainer
from jaxdp.callbacks import ModelCheckpoint
from jaxdp.checkpoint import programs

DATA = batches(16, 16, 16, 16)
TESTS = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A home and a run of two steps in it; the bits after four."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch, without_jax_cache():
        patch.setenv("XDG_CACHE_HOME", str(folder / "home"))
        fit(folder / "run", 2)
    return folder, bits(fit(folder / "whole", 4))


@contextlib.contextmanager
def without_jax_cache():
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # which JAX asks for once in a process
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    reset_cache()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache folder without a key, and no help from JAX's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JAXDP_TRUST_PROGRAMS", raising=False)
    with without_jax_cache():
        yield tmp_path / "home" / "jaxdp"


@pytest.fixture
def run(saved, home):
    """A folder with the checkpoint of step 2 and its programs, of this user."""
    shutil.copytree(saved[0] / "home", home.parent)
    return shutil.copytree(saved[0] / "run", home.parents[1] / "run")


@pytest.fixture
def compiled(monkeypatch):
    """The names of the steps that are compiled."""
    names, compile_ = [], jax.stages.Lowered.compile

    def watched(self, *arguments, **options):
        name = self.as_text().partition("@")[2].partition(" ")[0]
        names.extend([name] if name in ("jit_train", "jit_evaluate") else [])
        return compile_(self, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", watched)
    return names


def fit(folder, steps, data=DATA, strategy=None, saver=None, **options):
    trainer = Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=strategy or SingleDevice(),
        callbacks=[
            saver or ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        ],
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(data, DATA[:1], max_steps=steps, ckpt_path="auto")
    return trainer


def bits(trainer):
    leaves = jax.tree.leaves(trainer.state)
    return b"".join(np.asarray(leaf).tobytes() for leaf in leaves)


def files(folder):
    return sorted((pathlib.Path(folder) / "programs").iterdir())


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (lambda: SingleDevice(jax.devices()[3]), {}),
        (lambda: Sharded([jax.devices()[5], jax.devices()[2]]), {}),
        (lambda: Sharded(2), {"steps_per_execution": 2}),
        (lambda: Sharded(2), {"reproducible": "bitwise"}),
    ],
    ids=["one device", "two in another order", "several steps", "bitwise"],
)
def test_a_resumed_run_has_the_same_programs(strategy, options, compiled, tmp_path):
    whole = fit(tmp_path / "whole", 8, strategy=strategy(), **options)
    fit(tmp_path / "run", 4, strategy=strategy(), **options)
    kept = {path: path.stat().st_mtime_ns for path in files(tmp_path / "run")}
    assert len(kept) == 2  # of training and of validation
    compiled.clear()
    again = fit(tmp_path / "run", 8, strategy=strategy(), **options)
    assert compiled == []
    assert bits(again) == bits(whole)
    assert {each: each.stat().st_mtime_ns for each in files(tmp_path / "run")} == kept


def test_it_overwrites_the_state_as_the_first_one_did(run, compiled):
    trainer = fit(run, 3)
    old = trainer.run.engine.held.arrays
    trainer.fit(DATA, DATA[:1], max_steps=4)
    assert all(array.is_deleted() for array in old)
    assert compiled == []
    assert trainer.compiled_train_step().memory_analysis() is not None


def test_a_new_process_compiles_no_step(saved, run):
    script = (
        "import sys, conftest, jax, jax.stages as stages, hashlib\n"
        "sys.path.insert(0, 'checkpoint')\n"
        "import test_programs as ours\n"
        "names, compile_ = [], stages.Lowered.compile\n"
        "def watched(self, *given, **options):\n"
        "    names.append(self.as_text().split('@')[1].split(' ')[0])\n"
        "    return compile_(self, *given, **options)\n"
        "stages.Lowered.compile = watched\n"
        "trainer = ours.fit(sys.argv[1], 4)\n"
        "print('compiled', sorted({'jit_train', 'jit_evaluate'} & set(names)))\n"
        "print(hashlib.sha256(ours.bits(trainer)).hexdigest())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(run)],
        cwd=TESTS,
        env=os.environ
        | {
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    digest = hashlib.sha256(saved[1]).hexdigest()
    assert found.stdout.splitlines() == ["compiled []", digest], found.stderr
    assert "compiled steps were loaded from" in found.stderr


def test_others_are_compiled_and_it_is_said(run, compiled, caplog):
    fit(run, 4, compiler_options={"xla_cpu_enable_fast_math": True})
    assert compiled == ["jit_train", "jit_evaluate"]
    assert "a step is compiled again, and last bits may differ" in caplog.text
    compiled.clear()
    caplog.clear()

    fit(run, 6, data=batches(8, 8, 8, 8, 8, 8))
    assert compiled == ["jit_train"]
    assert "a step is compiled again, and last bits may differ" in caplog.text


def test_another_version_compiles(run, compiled, caplog, monkeypatch):
    monkeypatch.setattr(programs, "jaxlib_version", "9.9")
    fit(run, 4)
    assert compiled == ["jit_train", "jit_evaluate"]
    assert "a step is compiled again, and last bits may differ" in caplog.text
    assert len(files(run)) == 4


@pytest.mark.parametrize(
    "harm", ["a flipped bit", "half", "empty", "a link", "renamed"]
)
def test_a_damaged_one_is_compiled_anew_and_replaced(
    harm, saved, run, compiled, tmp_path
):
    first, second = files(run)
    content = first.read_bytes()
    if harm == "a flipped bit":
        place = len(content) - 100
        first.write_bytes(
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        )
    elif harm == "a link":
        first.rename(tmp_path / "elsewhere")
        first.symlink_to(tmp_path / "elsewhere")
    elif harm == "renamed":  # which is signed, and another step's
        first.write_bytes(second.read_bytes())
    else:
        first.write_bytes(content[: len(content) // 2] if harm == "half" else b"")
    with pytest.warns(UserWarning, match=f"{first.name}, a compiled step, is skipped"):
        again = fit(run, 4)
    assert len(compiled) == 1
    assert bits(again) == saved[1]
    assert first.read_bytes().partition(b"\n")[0] == content.partition(b"\n")[0]
    assert not first.is_symlink()


def test_a_strangers_program_is_not_looked_into(
    home, run, compiled, tmp_path, caplog, monkeypatch
):
    key = home / "programs.key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32

    # One that would run code, whole but for the signature.
    victim = files(run)[0]
    line, signed, _ = victim.read_bytes().split(b"\n", 2)
    bomb = pickle.dumps(_Bomb(str(tmp_path / "ran")))
    digest = hashlib.sha256(line + b"\n" + bomb).hexdigest().encode()
    signature = signed.partition(b" ")[2]
    victim.write_bytes(line + b"\n" + digest + b" " + signature + b"\n" + bomb)
    key.unlink()

    loads = []
    load = serialize_executable.deserialize_and_load
    monkeypatch.setattr(
        serialize_executable,
        "deserialize_and_load",
        lambda *given: loads.append(1) or load(*given),
    )
    fit(run, 4)
    assert compiled == ["jit_train", "jit_evaluate"] and loads == []
    assert not (tmp_path / "ran").exists()
    assert "2 of the compiled steps kept in" in caplog.text
    assert "JAXDP_TRUST_PROGRAMS=1 allows them" in caplog.text

    # Another's again, who is trusted.
    key.unlink()
    monkeypatch.setenv("JAXDP_TRUST_PROGRAMS", "1")
    compiled.clear()
    fit(run, 6)
    assert compiled == [] and len(loads) == 2


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_key_that_others_can_read_signs_nothing(home, run, compiled, caplog):
    (home / "programs.key").chmod(0o644)
    fit(run, 4)
    assert compiled == ["jit_train", "jit_evaluate"]
    assert "another key" in caplog.text


def test_what_cannot_be_kept_is_not_spoken_of(compiled, tmp_path, caplog):
    def loss_fn(model, x, y):
        jax.debug.callback(lambda _: None, x.sum())
        logits = jax.vmap(model)(x)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)

    for steps in (2, 4):
        trainer = Trainer(
            Mlp(jax.random.key(0), rate=0.0),
            optax.adam(1e-2),
            loss_fn=loss_fn,
            strategy=SingleDevice(),
            callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=2)],
            enable_progress_bar=False,
        )
        trainer.fit(DATA, max_steps=steps, ckpt_path="auto")
    assert compiled == ["jit_train", "jit_train"]
    assert not (tmp_path / "programs").exists()
    assert "compiled step" not in caplog.text and "anew" not in caplog.text


def test_what_jax_had_from_its_cache_is_not_kept_on_a_cpu(tmp_path, monkeypatch):
    """XLA would write it without its code, and running that fails."""
    compile_ = jax.stages.Lowered.compile

    def from_cache(self, *arguments, **options):
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compile_(self, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", from_cache)
    fit(tmp_path, 2)
    assert not (tmp_path / "programs").exists()


def test_they_go_along_to_another_folder(run, compiled, tmp_path):
    trainer = Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=SingleDevice(),
        callbacks=[ModelCheckpoint(tmp_path / "b", every_n_train_steps=2)],
        enable_progress_bar=False,
    )
    trainer.fit(DATA, DATA[:1], max_steps=4, ckpt_path=run / "2")
    assert compiled == []
    for ours, theirs in zip(files(tmp_path / "b"), files(run), strict=True):
        assert ours.name == theirs.name
        assert ours.read_bytes() == theirs.read_bytes()


def test_no_room_for_them_ends_nothing(tmp_path, caplog, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(programs, "replacing", full)
    trainer = fit(tmp_path, 4)
    assert trainer.global_step == 4
    assert caplog.text.count("compiled steps can't be kept in") == 1


def test_the_oldest_and_rubbish_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "_MOST_FILES", 2)
    folder = tmp_path / "programs"
    folder.mkdir()
    for number in range(3):
        old = folder / f"{number:032x}"
        old.write_text("old")
        os.utime(old, (number, number))
    (folder / f".{0:032x}.12").write_text("torn")
    fit(tmp_path, 2)
    assert len(files(tmp_path)) == 2
    for each in files(tmp_path):
        assert json.loads(each.read_bytes().partition(b"\n")[0])["jax"]


def test_nothing_is_removed_where_a_link_leads(tmp_path, caplog):
    """A checkpoint from elsewhere could have one to the user's home."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (".bashrc", f".{0:032x}.12"):
        (elsewhere / name).write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "programs").symlink_to(elsewhere)
    fit(run, 2)
    assert sorted(os.listdir(elsewhere)) == [f".{0:032x}.12", ".bashrc"]
    assert caplog.text.count("it is a link") == 1


def test_hidden_files_of_others_stay(tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / ".gitignore").write_text("*")
    fit(tmp_path, 2)
    assert (tmp_path / "programs" / ".gitignore").exists()


def test_one_more_shape_is_no_news(run, compiled, caplog):
    """The run before has not compiled it, or it would be kept."""
    fit(run, 4, data=[*DATA[:3], *batches(20)])
    assert compiled == ["jit_train"]
    assert "compiled steps were loaded from" in caplog.text
    assert "a step is compiled again" not in caplog.text


def test_a_fit_without_checkpoints_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jaxdp.Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=SingleDevice(),
        enable_progress_bar=False,
    ).fit(DATA, max_steps=1)
    assert os.listdir(tmp_path) == []
