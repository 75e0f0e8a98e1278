"""A training run that the fault tests start, harm and start again.

It is an ordinary one: shuffled loader with random augmentation, dropout, Adam,
validation, two loggers, early stopping, checkpoints by steps and by the best epoch.
`result.json` appears in its folder when it comes to its end, with what must be the same
whatever happened on the way.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

# Imported in the fork server, once for all jobs.
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint  # noqa: E402, F401
import tensorboard.summary.writer.event_file_writer  # noqa: E402, F401
import torch  # noqa: E402
from shown_events import events  # noqa: E402
from toys import Net, On  # noqa: E402

import jaxdp  # noqa: E402
from jaxdp import callbacks  # noqa: E402


class Noisy(torch.utils.data.Dataset):
    """Rows with noise from the global generators of torch, NumPy and Python."""

    def __init__(self, rows=40):
        generator = np.random.default_rng(0)
        self.x = generator.normal(size=(rows, 4)).astype(np.float32)
        self.y = (self.x.sum(1) > 0).astype(np.int64)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        noise = torch.rand(()).item() + np.random.rand() + random.random()
        return self.x[index] + np.float32(0.1 * noise), self.y[index]


def report_progress(root, pause):
    """A callback that tells the test how far the job is, and pauses at every step."""

    def write(trainer):
        (root / "progress").write_text(str(trainer.global_step))
        time.sleep(pause)

    return On(on_fit_start=write, on_boundary=write)


def harm_at(hook, at, what, *args):
    """A callback that does something at the n-th call of a hook."""
    calls = itertools.count(1)
    return On(**{hook: lambda *_: what(*args) if next(calls) == at else None})


def send_signal(name, to_group=False):
    """Sends this process a signal, or its whole group, workers included."""
    send, target = (os.killpg, 0) if to_group else (os.kill, os.getpid())
    send(target, getattr(signal, name))


def train(
    root,
    *,
    epochs=3,
    devices=1,
    strategy="Sharded",
    width=16,
    pause=0.0,
    harm=(),
    workers=0,
    rows=40,
    ckpt_path="auto",
    prepare=None,
    dirpath=None,
    memory=None,
    preemption=None,
    **options,
):
    """Runs the job in the folder `root`; to be called in a process of its own."""
    root = pathlib.Path(root)
    root.mkdir(parents=True, exist_ok=True)
    log = os.open(root / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.setpgid(0, 0)  # as a shell does for a job
    jax.config.update("jax_num_cpu_devices", devices)
    # Jobs are many and small, and would compile most of the time.
    jax.config.update("jax_compilation_cache_dir", str(root.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if prepare is not None:
        prepare()
    dataset = Noisy(rows)
    loader = torch.utils.data.DataLoader(
        dataset, 8, shuffle=True, num_workers=workers, multiprocessing_context=None
    )
    saver = callbacks.ModelCheckpoint(
        root / "checkpoints" if dirpath is None else dirpath,
        monitor="val_loss",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=2,
        every_n_epochs=1,
        **options,
    )
    often = [callbacks.ModelCheckpoint(memory, every_n_train_steps=1)] if memory else []
    trainer = jaxdp.Trainer(
        Net(width),
        optax.adam(1e-2),
        strategy=getattr(jaxdp, strategy)(),
        callbacks=[
            saver,
            *often,
            callbacks.CSVLogger(root),
            callbacks.TensorBoardLogger(root / "events"),
            callbacks.EarlyStopping(patience=100),
            callbacks.NanGuard(),
            *([callbacks.Preemption(*preemption)] if preemption else []),
            *[harm_at(*each) for each in harm],
            report_progress(root, pause),
        ],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(
        loader,
        torch.utils.data.DataLoader(dataset, 20),
        max_epochs=epochs,
        val_check_interval=3,
        ckpt_path=ckpt_path,
    )
    leaves = jax.tree.leaves(trainer.state)
    kept = {int(step): str(score) for step, score in saver._scores.items()}
    result = {
        "state": hashlib.sha256(
            b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
        ).hexdigest(),
        "history": trainer.history.state_dict(),
        "step": trainer.global_step,
        "checkpoints": sorted(kept.items()),
        "on disk": sorted(int(n) for n in os.listdir(saver.dirpath) if n.isdecimal()),
        "rubbish": sorted(n for n in os.listdir(saver.dirpath) if "-" in n),
        "csv": (root / "metrics.csv").read_text(),
        "events": events(root / "events"),
    }
    temporary = root / "result.tmp"
    temporary.write_text(json.dumps(result))
    temporary.rename(root / "result.json")


def remove(folder, step):
    """Removes a checkpoint."""
    from jaxdp.checkpoint.folder import CheckpointDir

    CheckpointDir(folder).remove(step)


def turn_back_the_clock():
    """From now on every look at the clock shows a minute less."""
    start, looks = time.time(), iter(range(10**9))
    time.time = lambda: start - 60 * next(looks)


def kill_a_worker():
    """Kills the worker processes, as the kernel does when memory is short."""
    for worker in multiprocessing.active_children():
        worker.kill()
