"""A run for `python -m jaxdp run`, which harms itself as it is told.

    script.py FOLDER {"harm": [[step, what], ...], ...}

The first harm comes in the first process that is started for it, and so on. Every
process and step is noted; `result.json` has what must be the same whatever happened.
"""

import ctypes
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import jax
import numpy as np
import optax

import jaxdp
from jaxdp import callbacks


class Net(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, width):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(4, width, key=keys[0])
        self.dropout = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(width, 2, key=keys[1])

    def __call__(self, x, *, key=None):
        return self.last(self.dropout(jax.nn.relu(self.first(x)), key=key))


class Harm(jaxdp.Callback):
    """Notes every step with its time, and does what it is told to at one."""

    def __init__(self, folder, pause, at, what):
        self.log = (folder / "steps").open("a", buffering=1)
        self.pause, self.at, self.what = pause, at, what

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.log.write(f"{trainer.global_step} {time.time()} {os.getpid()}\n")
        time.sleep(self.pause)
        if trainer.global_step == self.at:
            harm(self.what)


def harm(what):
    if what == "raise":
        raise ZeroDivisionError("of the user's own")
    elif what == "exit":
        sys.exit(3)
    elif what == "gil":
        ctypes.PyDLL(None).sleep(600)  # which does not let go of Python's lock
    elif what == "segv":  # in a thread
        threading.Thread(target=ctypes.string_at, args=(0,)).start()
        time.sleep(1)
    elif what == "inject":  # from outside, as a watchdog may do
        thread = ctypes.c_ulong(threading.get_ident())
        error = ctypes.py_object(RuntimeError)
        set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
        threading.Thread(target=set_error, args=(thread, error)).start()
        time.sleep(1)
    elif what == "memory":
        b"x" * 2**31
    elif what == "hang":
        time.sleep(600)
    else:
        os.kill(os.getpid(), getattr(signal, what))


def batches(seed, count=12, rows=8):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, rows, 4)).astype(np.float32)
    return [(each, (each.sum(1) > 0).astype(np.int64)) for each in x]


def main(folder, harm=(), epochs=4, devices=1, pause=0.0, every=100, notes=None):
    notes = folder if notes is None else pathlib.Path(notes)  # not on a full disk
    with (notes / "attempts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    attempt = len((notes / "attempts").read_text().split()) - 1
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep(600))
    at, what = ([*harm, *[(None, None)] * 1000])[attempt]
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_compilation_cache_dir", str(notes.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    trainer = jaxdp.Trainer(
        Net(16),
        optax.adam(1e-2),
        callbacks=[
            Harm(notes, pause, at, what),
            callbacks.ModelCheckpoint(every_n_train_steps=every),
            callbacks.CSVLogger(),
            callbacks.WeightAveraging(),
        ],
        default_root_dir=str(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(batches(0), batches(1, 2), max_epochs=epochs, ckpt_path="auto")
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.state)]
    result = {
        "state": hashlib.sha256(b"".join(leaves)).hexdigest(),
        "history": trainer.history.state_dict(),
        "step": trainer.global_step,
        "csv": (folder / "metrics.csv").read_text(),
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2]))
