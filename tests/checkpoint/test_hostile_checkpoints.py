"""Checkpoints of strangers, who know how they are sealed, and states half loaded."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from toys import batches, on_one_device

from jaxdp import Callback
from jaxdp.callbacks import CSVLogger, ModelCheckpoint, NanGuard, TensorBoardLogger
from jaxdp.checkpoint import CheckpointCorrupt


class Positioned:
    """Publishes where it is, in values of all the kinds that are saved."""

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
        self.trainer = on_one_device(
            CSVLogger(self.logs),
            TensorBoardLogger(self.logs),
            NanGuard(),
            ModelCheckpoint(self.steps, every_n_train_steps=2, save_top_k=2),
            log_every_n_steps=1,
        )
        self.fit(max_steps=9)
        shutil.copytree(self.steps, folder / "as saved" / "steps")
        shutil.copytree(self.logs, folder / "as saved" / "logs")
        self.meta = (self.steps / "8" / "meta" / "metadata").read_text()

    def fit(self, **options):
        self.trainer.fit(Positioned(), batches(8), val_check_interval=2, **options)

    def reset(self):
        """All as it was saved, and the trainer at step 8."""
        for folder in (self.steps, self.logs):
            shutil.rmtree(folder)
            shutil.copytree(self.folder / "as saved" / folder.name, folder)
        self.trainer.load(self.steps / "8")

    def forge(self, meta):
        """Puts other metadata in place of those of step 8, and seals them."""
        step = self.steps / "8"
        content = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
        (step / "meta" / "metadata").write_bytes(content)
        sums = json.loads((step / "files.json").read_bytes())
        sums["meta/metadata"] = hashlib.sha256(content).hexdigest()
        (step / "files.json").write_text(json.dumps(sums))

    def all(self):
        """Returns all that a `load` may change, but the arrays, which are new then."""
        trainer = self.trainer
        owners = trainer.run.progress, trainer.history, *trainer.callbacks
        return repr((trainer.record.run_id, *map(vars, owners)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("tensorboard")
    return Run(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("change, error, match", [
    ({"run_id": "../../x"}, CheckpointCorrupt,
     "`metadata.run_id` must be 32 hexadecimal digits"),
    ({"global_step": True}, CheckpointCorrupt,
     "`metadata.global_step` is True, and must be int"),
    ({"evaluated": []}, CheckpointCorrupt,
     r"`metadata.evaluated` is \[\], and must be dict"),
    ({"format": 1}, ValueError, "format 1, .* reads formats 2 and 3"),
    ({"format": 4}, ValueError, "format 4, .* reads formats 2 and 3"),
    (b"[" * 100_000 + b"]" * 100_000, CheckpointCorrupt, "it is nested too deeply"),
])  # fmt: skip
def test_metadata_of_another_schema_or_format_is_refused_whole(
    run, change, error, match
):
    run.reset()
    before, state = run.all(), run.trainer.state
    run.forge(change if isinstance(change, bytes) else json.loads(run.meta) | change)
    with pytest.raises(error, match=match):
        run.trainer.load(run.steps / "8")
    assert run.trainer.state is state and run.all() == before


@pytest.mark.parametrize("resumes", [False, True])
def test_a_callback_that_fails_to_take_up_its_state_leaves_that_of_the_run(
    run, resumes
):
    class Mistaken(Callback):
        def state_dict(self):
            return {"seen": 1}

        def load_state_dict(self, state):
            self.seen.append(state)

    run.reset()
    mistaken, trainer = Mistaken(), run.trainer
    trainer.callbacks.append(mistaken)
    try:
        path = run.steps / "11"
        run.fit(max_steps=11)
        if not resumes:
            path = trainer.save(run.folder / "mistaken")
            run.fit(max_steps=12)
        state, history = trainer.state, trainer.history.state_dict()
        with pytest.raises(AttributeError, match="'seen'") as raised:
            if resumes:  # which passes over no other checkpoint
                run.fit(max_steps=12, ckpt_path="auto")
            trainer.load(path)
        assert trainer.history.state_dict() == history
        assert resumes or trainer.state is state
    finally:
        trainer.callbacks.remove(mistaken)
    note = raised.value.__notes__[0]
    assert "of the callback Mistaken" in note
    assert note.endswith(f"{path} has of it; the trainer's state is as it was")


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
