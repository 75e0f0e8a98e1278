"""Checkpoints whose metadata somebody has written who knows how they are sealed."""

import hashlib
import itertools
import json
import math
import shutil

import jax
import numpy as np
import optax
import pytest
from toys import Mlp, batches

from jaxdp import Callback, SingleDevice, Trainer
from jaxdp.callbacks import (
    CSVLogger,
    EarlyStopping,
    GradientMonitor,
    ModelCheckpoint,
    NanGuard,
    TensorBoardLogger,
)
from jaxdp.checkpoint import CheckpointCorrupt, SaveFailed, restoring
from jaxdp.checkpoint.metadata import digest
from jaxdp.distributed import Processes

DEEP = json.loads("[" * 90 + "]" * 90)
VALUES = (None, True, -1, 1.5, math.inf, math.nan, "", "x", [], {}, 10**30, DEEP)


class Told:
    """Tells where it is, in values of all the kinds that are saved."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        data = batches(*[8] * 5)
        while self.at < 5:
            self.at += 1
            yield data[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": np.asarray(self.at), "by": {0: ("x", b"y")}}

    def load_state_dict(self, state):
        assert state["by"] == {0: ("x", b"y")}
        self.at = int(state["at"])


class Run:
    """A trainer with all that saves something, and checkpoints of steps 6 and 8."""

    def __init__(self, folder):
        self.folder, self.steps, self.logs = folder, folder / "steps", folder / "logs"
        self.trainer = Trainer(
            Mlp(jax.random.key(0)),
            optax.adam(1e-2),
            loss="cross_entropy",
            strategy=SingleDevice(),
            callbacks=[
                CSVLogger(self.logs),
                TensorBoardLogger(self.logs),
                EarlyStopping("loss", patience=100, verbose=False),
                GradientMonitor(check_steps=100),
                NanGuard(),
                ModelCheckpoint(self.steps, every_n_train_steps=2, save_top_k=2),
            ],
            enable_progress_bar=False,
            log_every_n_steps=1,
        )
        self.fit(max_steps=9)
        shutil.copytree(self.steps, folder / "as saved" / "steps")
        shutil.copytree(self.logs, folder / "as saved" / "logs")
        self.meta = (self.steps / "8" / "meta" / "metadata").read_text()

    def fit(self, **options):
        self.trainer.fit(Told(), batches(8), val_check_interval=2, **options)

    def reset(self):
        """All as it was saved, and the trainer at step 8."""
        for folder in (self.steps, self.logs):
            shutil.rmtree(folder)
            shutil.copytree(self.folder / "as saved" / folder.name, folder)
        self.trainer.load(self.steps / "8")

    def forge(self, meta):
        """Puts other metadata in place of those of step 8, and seals them."""
        step = self.steps / "8"
        meta.pop("digest", None)
        content = json.dumps(meta | {"digest": digest(meta)}).encode()
        (step / "meta" / "metadata").write_bytes(content)
        sums = json.loads((step / "files.json").read_bytes())
        sums["meta/metadata"] = hashlib.sha256(content).hexdigest()
        (step / "files.json").write_text(json.dumps(sums))

    def all(self):
        """What a `load` may change, but for the arrays, which are new ones then."""
        trainer = self.trainer
        owners = trainer.run.progress, trainer.history, *trainer.callbacks
        return repr((trainer.run.id, trainer.run.padded_rows, *map(vars, owners)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("tensorboard")
    return Run(tmp_path_factory.mktemp("hostile"))


def places(value, at=()):
    """Where something is in a JSON value, by keys and indices from the top.

    Of lists, and of the descriptions of arrays, some are as good as all.
    """
    if at not in ((), ("digest",)):
        yield at
    if isinstance(value, dict):
        some = 2 if at in (("leaves",), ("fingerprints",)) else None
        for key in list(value)[:some]:
            yield from places(value[key], (*at, key))
    if isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from places(value[index], (*at, index))


def with_value(text, at, value):
    meta = inner = json.loads(text)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return meta


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [8, 1])
def test_metadata_of_any_types_are_refused_whole_or_load(run, share):
    run.reset()
    trainer, found = run.trainer, {"refused": 0, "loaded": 0}
    tries = itertools.product(places(json.loads(run.meta)), VALUES)
    for number, (at, value) in enumerate(tries):
        if number % (share * len(VALUES) + 1) % share:
            continue
        run.forge(with_value(run.meta, at, value))
        before, state = run.all(), trainer.state
        try:
            trainer.load(run.steps / "8")
            found["loaded"] += 1
        except ValueError as error:  # and no other
            assert str(run.steps / "8") in str(error), (at, value)
            assert trainer.state is state and run.all() == before, (at, value)
            found["refused"] += 1
    assert found["refused"] > 1200 / share and found["loaded"] > 50 / share, found


def test_auto_takes_the_next_one_where_callbacks_cannot_take_theirs_up(run):
    run.reset()
    at = "callbacks", "EarlyStopping", "wait_count"
    run.forge(with_value(run.meta, at, "long"))
    match = "steps/8: ValueError: `state.wait_count` is 'long', and must"
    with pytest.warns(UserWarning, match=match):
        run.fit(max_steps=7, ckpt_path="auto")
    assert run.trainer.global_step == 7


def test_best_judges_by_the_next_one_where_scores_are_none(run):
    run.reset()
    run.trainer.callbacks[-1].monitor = "loss"
    at = "callbacks", "ModelCheckpoint", "scores"
    run.forge(with_value(run.meta, at, {"../../x": []}))
    try:
        with pytest.warns(UserWarning, match="'best'.*ModelCheckpoint can't load"):
            run.fit(max_steps=7, ckpt_path="best")
    finally:
        run.trainer.callbacks[-1].monitor = None
    assert run.trainer.global_step == 7


def test_a_mistake_in_a_users_callback_passes_over_no_checkpoint(run):
    class Mistaken(Callback):
        def state_dict(self):
            return {"seen": 1}

        def load_state_dict(self, state):
            self.seen.append(state)

    run.reset()
    mistaken, trainer = Mistaken(), run.trainer
    trainer.callbacks.append(mistaken)
    try:
        run.fit(max_steps=11)
        with pytest.raises(AttributeError, match="'seen'") as raised:
            run.fit(max_steps=12, ckpt_path="auto")
    finally:
        trainer.callbacks.remove(mistaken)
    note = raised.value.__notes__[0]
    assert "while the callback Mistaken took up" in note
    assert note.endswith("/steps/10 has of it; nothing was changed")


@pytest.mark.parametrize(
    ("here", "there", "kind"),
    [
        (None, CheckpointCorrupt, CheckpointCorrupt),
        (None, KeyError, RuntimeError),
        (CheckpointCorrupt, KeyError, RuntimeError),
        (KeyError, CheckpointCorrupt, KeyError),
    ],
)
def test_processes_pass_over_a_checkpoint_together_or_not_at_all(here, there, kind):
    class Two(Processes):
        def any(self, what, error):
            is_over = what.startswith("passing over") and there is CheckpointCorrupt
            found = [error, None if is_over else there("that")]
            return "; ".join(map(str, filter(None, found))) or None

    with pytest.raises(Exception, match="th") as raised:  # noqa: PT011, PT012
        with restoring._alike(Two(), "some"):
            if here is not None:
                raise here("this")
    assert raised.type is kind


def test_a_callback_that_fails_to_take_up_its_state_undoes_what_was(run):
    class Foreign(Callback):
        def __init__(self):
            self.seen = [1]

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen.clear()
            self.more = state["what was never saved"]

    run.reset()
    foreign, trainer = Foreign(), run.trainer
    trainer.callbacks.append(foreign)
    try:
        path = trainer.save(run.folder / "foreign")
        before, state = run.all(), trainer.state
        with pytest.raises(KeyError, match="what was never saved"):
            trainer.load(path)
        assert trainer.state is state and run.all() == before
        assert foreign.seen == [1] and not hasattr(foreign, "more")
    finally:
        trainer.callbacks.remove(foreign)


def strings(meta):
    """Where a JSON value has strings."""
    for at in places(meta):
        value = meta
        for key in at:
            value = value[key]
        if isinstance(value, str):
            yield at


def with_names(value, name):
    """The same, and in every object one more field."""
    if isinstance(value, list):
        return [with_names(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    more = {name: next(iter(value.values()))} if value else {}
    return {key: with_names(item, name) for key, item in value.items()} | more


def contents(*folders):
    return {
        path: path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow_but("pattern")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["above", "absolute", "pattern", "format"])
def test_no_string_of_the_metadata_leads_out_of_the_run(run, tmp_path, kind):
    """Each is forged alone; then, at once, those that may be anything, and names."""
    run.reset()
    victim, events = tmp_path / "victim", "events.out.tfevents.1.host.1.0.jaxdp-other"
    (victim / "1").mkdir(parents=True)
    for path in victim / events, victim / "metrics.csv", victim / "1" / "data":
        path.write_text("precious")
    (run.logs / events).write_text("precious")  # of another run, in the same folder
    string = {
        "above": f"x/../../../../{tmp_path.name}/victim/*",
        "absolute": str(victim / "metrics.csv"),
        "pattern": "*",
        "format": "{0.__class__}%s%n\x1b[2J\n\x00",
    }[kind]
    before, meta = contents(victim), json.loads(run.meta)
    for at in strings(json.loads(run.meta)):
        run.forge(with_value(run.meta, at, string))
        try:
            run.trainer.load(run.steps / "8")
        except ValueError:
            continue
        assert at != ("run_id",)
        if at[0] not in ("source", "place"):
            meta = with_value(json.dumps(meta), at, string)
    for part in meta.keys() - {"leaves", "source", "place"}:
        meta[part] = with_names(meta[part], string)
    run.forge(meta | {string: 1})
    run.fit(ckpt_path=run.steps / "8", max_steps=10)
    assert run.trainer.global_step == 10
    run.forge(with_value(run.meta, ("source", "own", "by"), string))
    with pytest.raises(ValueError, match="`train_loader`: Told can't load"):
        run.fit(ckpt_path=run.steps / "8", max_steps=11)
    assert contents(victim) == before
    assert b"precious" in contents(run.logs).values()
    assert {*tmp_path.rglob("*")} == {victim, victim / "1", *before}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (
            "meta/metadata",
            "meta/metadata can't be read: it has 1,099,511,627,776 bytes",
        ),
        ("files.json", "files.json can't be read: it has 1,099,511,627,776 bytes"),
        ("state/_METADATA", r"state/_METADATA \(1,099,511,627,776 bytes, more than"),
        ("state/more", "changed since it was saved, or missing: state/more"),
        ("more", ""),
    ],
)
def test_a_terabyte_is_not_read(run, file, told):
    run.reset()
    with (run.steps / "8" / file).open("ab") as opened:
        opened.truncate(2**40)  # of zeros that take no room on the disk
    if not told:
        run.trainer.load(run.steps / "8")
        return
    with pytest.raises(CheckpointCorrupt, match=told):
        run.trainer.load(run.steps / "8")


def test_what_could_not_be_read_again_is_not_saved(run):
    class Deep(Callback):
        def state_dict(self):
            return {"deep": json.loads("[" * 200 + "]" * 200)}

    run.reset()
    run.trainer.callbacks.append(Deep())
    try:
        with pytest.raises(SaveFailed, match="100 deep.* largest part is 'callbacks'"):
            run.trainer.save(run.folder / "deep")
    finally:
        run.trainer.callbacks.pop()
    assert not (run.folder / "deep").exists()
