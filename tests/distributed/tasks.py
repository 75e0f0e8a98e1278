"""Tasks for processes of a test. The server that they fork from imports this once."""

import atexit
import hashlib
import importlib
import importlib.metadata
import os
import signal
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint  # noqa: E402, F401
import torch  # noqa: E402
from toys import Net  # noqa: E402

import jaxdp  # noqa: E402
from jaxdp import callbacks  # noqa: E402


def run(task, index, count, port, folder, start, **options):
    """Calls a task in a process of its own, and ends it as the interpreter would."""
    log = os.open(f"{folder}/{index}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ["JAX_NUM_PROCESSES"] = str(count)
    os.environ["JAX_PROCESS_ID"] = str(index)
    os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    jax.config.update("jax_num_cpu_devices", start.pop("devices", 1))
    if start.pop("too_early", False):
        jax.devices()
    others = start.pop("versions", {}).get(index, {})
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: others.get(name) or version(name)
    jax.config.update("jax_compilation_cache_dir", start.pop("compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    code = 0
    try:
        jaxdp.distributed.initialize(**{"shutdown_timeout": 20.0, **start})
        find(task)(**options)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = 130 if type(error) is KeyboardInterrupt else 1  # as Python does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def find(task):
    """`name` here, or `module.name`."""
    module, _, name = task.rpartition(".")
    return getattr(importlib.import_module(module or __name__), name)


def in_turn(scenes):
    """Several tasks in one job."""
    for name, (task, options) in scenes.items():
        say("scene", name)
        find(task)(**options)


def say(*text):
    print(*text, flush=True)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def half(prediction, target):
    return 0.5 * cross_entropy(prediction, target)


class At(jaxdp.Callback):
    """Does something at a step, in one process; tells the test of each step."""

    def __init__(self, index, step, what):
        self.index, self.step, self.what = index, step, what

    def on_boundary(self, trainer):
        say("done", trainer.global_step)
        if trainer.global_step == self.step and jax.process_index() == self.index:
            self.what(trainer)

    def on_exception(self, trainer, exception):
        say(f"heard of an exception at {time.monotonic():.2f}")


class Before(jaxdp.Callback):
    """Does something before a step, which the other processes have in flight then."""

    def __init__(self, index, step, what):
        self.index, self.step, self.what = index, step, what

    def on_train_batch_start(self, trainer, batch, batch_idx):
        is_there = trainer.global_step + 1 == self.step
        if is_there and jax.process_index() == self.index:
            say("before", self.step)
            self.what(trainer)


def rows(count=64):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 4)).astype(np.float32)
    return torch.utils.data.TensorDataset(
        torch.from_numpy(x), torch.from_numpy((x.sum(1) > 0).astype(np.int64))
    )


def load(data=None, size=8, **options):
    return torch.utils.data.DataLoader(data or rows(), size, **options)


def make(model=None, optimizer=None, **options):
    model = Net() if model is None else model
    options = {"loss": "cross_entropy", "enable_progress_bar": False} | options
    return jaxdp.Trainer(model, optimizer, **options)


def mine(value, other, index=1):
    """`value`, and `other` in one process."""
    return other if jax.process_index() == index else value


SAME = {"width": 8, "key": 0, "seed": 0, "loss": cross_entropy, "batch": 8, "rows": 64}


def fit(*, other=None, lockstep=None, logs=None, at=None, before=None, **options):
    """A small training, in which process 1 may have `other` values of `SAME`."""
    same = SAME | mine({}, other or {})
    trainer = make(
        Net(same["width"], same["key"]),
        optax.sgd(1e-2),
        loss=same["loss"],
        seed=same["seed"],
        callbacks=[
            *([callbacks.Lockstep(**lockstep)] if lockstep else []),
            At(*(at or (-1, -1, None))),
            *([Before(*before)] if before else []),
            *([callbacks.CSVLogger(logs)] if logs else []),
        ],
        **options,
    )
    trainer.fit(load(rows(same["rows"]), same["batch"], shuffle=True), max_epochs=2)
    tell_end(trainer)


def fit_in_turn(cases):
    """One `fit` after the other, whatever comes of it."""
    for name, options in cases.items():
        say("case", name)
        try:
            fit(**options)
        except (RuntimeError, ValueError) as error:
            say("found", error)


# What `At` may do.


def kill(trainer):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(trainer):
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(trainer):
    raise ValueError("a bad day")


def leave(trainer):
    sys.exit(0)


def skip(trainer):
    trainer.run.progress.epoch += 1


def linger(trainer):
    time.sleep(6)


class Failing(torch.utils.data.Dataset):
    """Has two rows in its sixth batch that can't be read: one for each process."""

    def __init__(self, broken):
        self.rows, self.broken = rows(), broken

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.broken and index in (40, 44):
            raise OSError("a row can't be read")
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    """Has no length that could be compared."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


def evaluate_apart():
    """Not the same passes, and passes that are not equally long."""
    trainer, loader, stream = make(), load(), load(Stream(mine(64, 40)))
    for call in (
        mine(lambda: trainer.test(loader), lambda: trainer.predict(loader)),
        lambda: trainer.test(stream),
        lambda: trainer.predict(stream),
    ):
        try:
            call()
        except RuntimeError as error:
            say("found", error)
    say("test_loss", trainer.test(loader)["test_loss"])


def nothing():
    say("here")


def fail_alone():
    if jax.process_index() == 1:
        raise ValueError("a bad day")
    time.sleep(60)


def catch_it():
    """Both fail alike and go on: none of the other's business."""
    for broken in (True, False):
        trainer = make()
        try:
            trainer.fit(load(Failing(broken)), max_epochs=1)
        except OSError as error:
            say("caught", error)
            time.sleep(4)  # longer than the others are given
    say("went on to step", trainer.global_step)


def survive(path, killed=None, at=8, memory=None):
    """Trains from the last checkpoint on, if there is one; may be killed first."""
    often = [callbacks.ModelCheckpoint(memory, every_n_train_steps=2)] if memory else []
    saver = callbacks.ModelCheckpoint(path, every_n_train_steps=3)
    killer = At(-1 if killed is None else killed, at, kill)
    trainer = make(optimizer=optax.adam(1e-2), callbacks=[saver, *often, killer])
    trainer.fit(load(shuffle=True), max_epochs=2, ckpt_path="auto")
    return tell_end(trainer)


def tell_end(trainer):
    leaves = jax.tree.leaves(trainer.model)
    bits = b"".join(np.asarray(x).tobytes() for x in leaves if eqx.is_array(x))
    end = f"ended {trainer.global_step} {hashlib.sha256(bits).hexdigest()}"
    say(end)
    return end


def save_often(path):
    """Saves at every second step what takes longer to write than to train."""
    saver = callbacks.ModelCheckpoint(path, every_n_train_steps=2)
    options = {"strategy": jaxdp.FSDP(), "callbacks": [saver]}
    trainer = make(Net(100_000), optax.adam(1e-3), **options)
    trainer.fit(load(shuffle=True), max_epochs=3, ckpt_path="auto")
    tell_end(trainer)
