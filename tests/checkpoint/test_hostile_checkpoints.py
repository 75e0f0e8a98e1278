"""Checkpoints of strangers, who know how they are sealed, and states half loaded."""

import hashlib
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from toys import Mlp, batches

from jaxdp import Callback, SingleDevice, Trainer
from jaxdp.callbacks import CSVLogger, ModelCheckpoint, NanGuard, TensorBoardLogger
from jaxdp.checkpoint import CheckpointCorrupt, restoring
from jaxdp.distributed import ProcessGroup


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
    """A trainer with all that writes files, and checkpoints of steps 6 and 8."""

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
        content = json.dumps(meta).encode()
        (step / "meta" / "metadata").write_bytes(content)
        sums = json.loads((step / "files.json").read_bytes())
        sums["meta/metadata"] = hashlib.sha256(content).hexdigest()
        (step / "files.json").write_text(json.dumps(sums))

    def all(self):
        """What a `load` may change, but for the arrays, which are new ones then."""
        trainer = self.trainer
        owners = trainer.run.progress, trainer.history, *trainer.callbacks
        return repr((trainer.record.run_id, *map(vars, owners)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("tensorboard")
    return Run(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"run_id": "../../x"}, "`metadata.run_id` must be 32 hexadecimal digits"),
        ({"global_step": True}, "`metadata.global_step` is True, and must be int"),
        ({"evaluated": []}, r"`metadata.evaluated` is \[\], and must be dict"),
    ],
)
def test_metadata_of_another_schema_is_refused_whole(run, change, told):
    run.reset()
    before, state = run.all(), run.trainer.state
    run.forge(json.loads(run.meta) | change)
    with pytest.raises(CheckpointCorrupt, match=told):
        run.trainer.load(run.steps / "8")
    assert run.trainer.state is state and run.all() == before


@pytest.mark.parametrize("number", [1, 4])
def test_another_format_says_what_reads_it(run, number):
    run.reset()
    run.forge(json.loads(run.meta) | {"format": number})
    with pytest.raises(ValueError, match=f"format {number}, .* reads formats 2 and 3"):
        run.trainer.load(run.steps / "8")


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
    assert note.endswith("/steps/11 has of it; the state is as it was")


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
    class Two(ProcessGroup):
        def gather_errors(self, what, error):
            is_over = what.startswith("passing over") and there is CheckpointCorrupt
            found = [error, None if is_over else there("that")]
            return "; ".join(map(str, filter(None, found))) or None

    with pytest.raises(Exception, match="th") as raised:  # noqa: PT011, PT012
        with restoring.load_together(Two(), "some"):
            if here is not None:
                raise here("this")
    assert raised.type is kind


def test_a_callback_that_fails_to_take_up_its_state_leaves_that_of_the_run(run):
    class Foreign(Callback):
        def state_dict(self):
            return {"seen": 1}

        def load_state_dict(self, state):
            self.more = state["what was never saved"]

    run.reset()
    foreign, trainer = Foreign(), run.trainer
    trainer.callbacks.append(foreign)
    try:
        path = trainer.save(run.folder / "foreign")
        run.fit(max_steps=10)
        state, history = trainer.state, trainer.history.state_dict()
        with pytest.raises(KeyError, match="what was never saved"):
            trainer.load(path)
        assert trainer.state is state and trainer.history.state_dict() == history
        assert trainer.global_step == 10
    finally:
        trainer.callbacks.remove(foreign)


def with_string(value, string):
    """The same with this for every text that is no number, and as one more name."""
    if isinstance(value, list):
        return [with_string(item, string) for item in value]
    if isinstance(value, dict):
        more = {string: next(iter(value.values()))} if value else {}
        return {k: with_string(v, string) for k, v in (value | more).items()}
    is_text = isinstance(value, str) and not value.replace(".", "").isdecimal()
    return string if is_text else value


def contents(*folders):
    return {
        path: path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["above", "absolute", "pattern", "format"])
def test_no_string_of_the_metadata_leads_out_of_the_run(run, tmp_path, kind):
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
    for part in meta.keys() - {"leaves", "source", "place", "run_id"}:
        meta[part] = with_string(meta[part], string)
    run.forge(meta | {string: 1})
    run.fit(ckpt_path=run.steps / "8", max_steps=10)
    assert run.trainer.global_step == 10
    assert contents(victim) == before
    assert b"precious" in contents(run.logs).values()
    assert {*tmp_path.rglob("*")} == {victim, victim / "1", *before}


@pytest.mark.parametrize(
    ("file", "is_refused"), [("state/more", True), ("more", False)]
)
def test_other_files_in_a_checkpoint_are_not_read(run, file, is_refused):
    run.reset()
    with (run.steps / "8" / file).open("ab") as opened:
        opened.truncate(2**40)  # of zeros that take no room on the disk
    if not is_refused:
        run.trainer.load(run.steps / "8")
        return
    with pytest.raises(CheckpointCorrupt, match="or missing: state/more"):
        run.trainer.load(run.steps / "8")
