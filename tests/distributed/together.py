"""Scenes for the processes of `test_together`; each prints JSON for the test."""

import contextlib
import datetime
import faulthandler
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from toys import (
    At,
    Deep,
    Mlp,
    NormNet,
    On,
    Recorder,
    fail_with,
    linear,
    mlp,
    rows,
    scores,
)

import jaxdp
from jaxdp import callbacks
from jaxdp.distributed import PeriodicVote, get_process_group

faulthandler.register(signal.SIGUSR2, all_threads=True)

ROWS = 53
"""In batches of 16: the last one has five, and leaves some processes without any."""


def strategies():
    halves = [("first.weight", PartitionSpec("model", None))]
    devices = jax.device_count()
    return {
        "Sharded": jaxdp.Sharded,
        "Pmap": jaxdp.Pmap,
        "ZeRO": jaxdp.ZeRO,
        "FSDP": jaxdp.FSDP,
        "FSDP in groups": lambda: jaxdp.FSDP(groups=jax.process_count()),
        "TensorParallel": lambda: jaxdp.TensorParallel(
            {"data": devices // 2, "model": 2}, halves
        ),
        "across": lambda: jaxdp.TensorParallel({"data": 1, "model": devices}, halves),
        "sequence": lambda: jaxdp.SequenceParallel(
            {"data": 1, "seq": devices}, fsdp=True
        ),
        "rows and sequence": lambda: jaxdp.SequenceParallel(
            {"data": devices // 2, "seq": 2}
        ),
        "Pipeline": lambda: jaxdp.Pipeline(devices, 3),
        "LocalSGD": lambda: jaxdp.LocalSGD(every=3, devices=4),
        "SingleDevice": jaxdp.SingleDevice,
        "Bitwise": lambda: jaxdp.Bitwise(jaxdp.Sharded()),
        "Bitwise Pmap": lambda: jaxdp.Bitwise(jaxdp.Pmap()),
    }


def trainer(strategy="Sharded", hooks=(), model=None, deep=False, **options):
    options = {"loss": "cross_entropy", "metrics": ["accuracy"]} | options
    if model is None:
        model = Deep() if deep else Mlp(jax.random.key(0))
    return jaxdp.Trainer(
        model,
        optax.adam(1e-2),
        strategy=strategies()[strategy](),
        callbacks=hooks,
        enable_progress_bar=False,
        **options,
    )


def data(count=ROWS):
    x, y = rows(count)
    return TensorDataset(torch.tensor(x), torch.tensor(y, dtype=torch.int64))


def tell(**values):
    print("told " + json.dumps(values), flush=True)


def numbers(strategy="Sharded", epochs=2, **options):
    """All the numbers of a short run with dropout and ragged batches."""
    recorder = Recorder()
    run = trainer(strategy, [recorder], **options)
    loader = DataLoader(data(), 16, shuffle=True)
    history = run.fit(loader, DataLoader(data(), 16), max_epochs=epochs)
    found = {
        "losses": recorder.losses,
        "history": history["val_loss"] + history["accuracy"],
        "test": list(run.test(DataLoader(data(), 16)).values()),
        "predictions": run.predict(DataLoader(data(), 16)).ravel().tolist(),
        "weights": weights_of(run),
        "examples": [run.run.progress.examples],
    }
    return found


def weights_of(run):
    leaves = [leaf for leaf in jax.tree.leaves(run.model) if hasattr(leaf, "dtype")]
    return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves]).tolist()


def of_process(batches, local):
    """The rows of this process of each batch, if it has any; or all, if not `local`."""
    own = slice(jax.process_index(), None, jax.process_count())

    def select(node):
        return node if isinstance(node, jaxdp.Whole) else node[own]

    def is_array(node):
        return isinstance(node, jaxdp.Whole | np.ndarray)

    found = [jax.tree.map(select, each, is_leaf=is_array) for each in batches]
    return [each for each in found if len(each[1])] if local else batches


def kind_of(local):
    return "local" if local else "global"


def refusal(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def here(index, step, what, hook="on_train_batch_end"):
    """Does something in one process, when it has done so many steps."""
    is_here = index == jax.process_index()
    return At(step if is_here else None, what, hook)


def slow(seconds=0.02):
    """Steps of a length that a clock can see."""
    return On(on_train_batch_end=lambda *_: time.sleep(seconds))


def all_numbers(cases):
    for name, options in cases.items():
        tell(name=name, found=numbers(**options))


def plateaus():
    """The rate that processes come to together, and what one of them sets alone."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    plateau = callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=1e9)
    run = jaxdp.Trainer(
        Mlp(jax.random.key(0)),
        optimizer,
        loss="cross_entropy",
        callbacks=[plateau],
        enable_progress_bar=False,
    )
    run.fit(DataLoader(data(), 16), DataLoader(data(), 16), max_epochs=3)
    tell(rate=run.hyperparams["learning_rate"], weights=weights_of(run))
    rate = 0.1 * (1 + jax.process_index())
    error = refusal(run.set_hyperparams, learning_rate=rate)
    tell(error=error, rate=run.hyperparams["learning_rate"])


def planned():
    """Reports the hosts, rows and traffic that plans have for the processes."""
    run = trainer("FSDP")
    loader = DataLoader(data(64), 16)

    def found(plan):
        crosses = [each.crosses for each in plan.traffic]
        return {"hosts": plan.num_hosts, "rows": plan.rows, "crosses": crosses}

    before = found(run.plan(loader))
    run.fit(loader)
    other, faked = trainer("Sharded", data="local"), {}
    if run.is_global_zero:  # planning is a matter of one process
        faked["local"] = other.plan(loader).rows
        faked["faked"] = other.plan(loader, devices=16).num_hosts
    tell(before=before, running=found(run.running_plan()), **faked)


class Logged(Dataset):
    """Knows who was asked for, and can't be fetched in one operation."""

    def __init__(self, count=ROWS):
        self.x, self.y = rows(count)
        self.asked = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.x[index], self.y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*rows(ROWS), strict=True)


def own_collate(samples):
    x, y = zip(*samples, strict=True)
    return {"x": np.stack(x), "y": np.stack(y)}


def dict_loss(model, batch, keys):
    return optax.softmax_cross_entropy_with_integer_labels(
        jax.vmap(model)(batch["x"], key=keys), batch["y"]
    )


def scalar_loss(prediction, target):
    loss = optax.softmax_cross_entropy_with_integer_labels(prediction, target)
    return loss.mean() + 0.1 * prediction.std()


def mixing_loss(prediction, target):
    """A value per row, in which other rows have a part."""
    loss = optax.softmax_cross_entropy_with_integer_labels(prediction, target)
    return loss + 0.1 * prediction.std()


def arrays():
    x, y = rows(ROWS)
    return [(x[at : at + 16], y[at : at + 16]) for at in range(0, ROWS, 16)]


def losses(loader, epochs=2, **options):
    recorder = Recorder()
    # Alone, this is what the processes are compared with.
    strategy = "Sharded" if jax.process_count() > 1 else "SingleDevice"
    run = trainer(strategy, [recorder], **options)
    run.fit(loader, max_epochs=epochs)
    return recorder.losses


def predict_in_full(model, state):
    """Predicts batches that each device computes in full: their sizes do not divide."""
    strategy = "Sharded" if jax.process_count() > 1 else "SingleDevice"
    x, _ = rows(ROWS)
    run = trainer(strategy, model=model, state=state)
    return run.predict([x[:10], x[10:13], x[13:30]]).ravel().tolist()


def loaders():
    """The losses of all kinds of loaders and options."""
    multiprocessing.current_process()._config["daemon"] = False  # may have children
    logged = Logged()
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    found = {
        "list": losses(arrays()),
        "Arrays": losses(jaxdp.Arrays(*rows(ROWS), batch_size=16)),
        "Arrays on a device": losses(
            jaxdp.Arrays(*jax.device_put(rows(ROWS)), batch_size=16)
        ),
        "iterator": losses(iter(arrays()), epochs=1),
        "by index": losses(DataLoader(logged, 16, shuffle=True)),
        "stream": losses(DataLoader(Stream(), 16)),
        "own collate": losses(
            DataLoader(Logged(), 16, shuffle=True, collate_fn=own_collate),
            loss=None,
            loss_fn=dict_loss,
            metrics=(),
        ),
        "accumulated": losses(arrays(), accumulate_grad_batches=3),
        "in blocks": losses(arrays(), steps_per_execution=3),
        "interacting": losses(arrays(), loss=scalar_loss),
        "values that interact": losses(arrays(), loss=mixing_loss),
        "one row for each device": losses(
            [(x[:4], y[:4]) for x, y in arrays()], epochs=1, loss=mixing_loss
        ),
        "batch norm": losses(arrays(), model=model, state=state),
        "predicted by batch norm": predict_in_full(model, state),
        "workers": losses(DataLoader(Logged(), 16, shuffle=True, num_workers=1)),
    }
    tell(found=found, asked=logged.asked)


class Lengths(eqx.Module):
    """Sums rows of any length, and classifies the sum."""

    last: eqx.nn.Linear

    def __call__(self, x):
        return self.last(x.sum(0))


def buckets(local=False):
    """Batches of two lengths, of all rows or its own ones; the last one has one row.

    Then, of its own rows, each process has another length than the others.
    """
    model = Lengths(linear())

    def batch(length, number):
        x, y = rows(length * number, seed=length)
        return x.reshape(number, length, 4), y[:number]

    data = [batch(2, 16), batch(3, 8), batch(2, 16), batch(2, 1)]
    recorder = Recorder()
    run = trainer(hooks=[recorder], model=model, data=kind_of(local))
    run.fit(of_process(data, local), max_epochs=2)
    other = [batch(2 + jax.process_index(), 8)]
    wrong = refusal(run.fit, other, max_epochs=3) if local else ""
    tell(losses=recorder.losses, wrong=wrong)


class Timed(eqx.Module):
    """Classifies a row, weighed by times that all rows share."""

    last: eqx.nn.Linear

    def __call__(self, x):
        row, times = x
        return self.last(row * times.sum())


def wholes(local=False):
    """Of all rows, or of own ones; then with other values in each process.

    Of the last batch the second process has no rows.
    """

    def batch(count, times):
        x, y = rows(count, seed=count)
        return (x, jaxdp.Whole(np.asarray(times, np.float32))), y

    # One that has no batch left goes on with the times that it had.
    last = [1.0, 2.0] if local else [0.5, 1.5, 0.5]
    mine = of_process([batch(16, [1.0, 2.0]), batch(1, last)], local)
    recorder = Recorder()
    run = trainer(hooks=[recorder], model=Timed(linear()), data=kind_of(local))
    run.fit(mine, max_epochs=2)
    predicted = run.predict(mine).sum(axis=0).tolist()
    losses, other = [*recorder.losses], [batch(8, [jax.process_index(), 1.0])]
    wrong = refusal(run.fit, other, max_epochs=3) if local else ""
    tell(losses=losses, predicted=predicted, wrong=wrong)


def on_devices(local=False):
    """On NumPy's arrays, on JAX's, and put there ahead; then on one that spans all."""
    x, y = rows(22)  # the last batch is short
    data = [(x[start : start + 8], y[start : start + 8]) for start in range(0, 22, 8)]
    data = of_process(data, local)
    there = jax.tree.map(jnp.asarray, data)
    weights, predictions = [], []
    for batches, ahead in (data, False), (there, False), (data, True), (there, True):
        run = trainer(data=kind_of(local))
        run.run.engine.prefetches = ahead
        run.fit(batches, batches, max_epochs=2)
        weights.append([np.asarray(w).tolist() for w in jax.tree.leaves(run.model)[:2]])
        predictions.append(run.predict(batches).tolist())

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    of_all = jax.make_array_from_callback((8, 4), sharding, x[:8].__getitem__)
    wrong = refusal(run.fit, [(of_all, y[:8])], max_epochs=3)
    tell(weights=weights, predictions=predictions, wrong=wrong)


def values(local=False):
    """Metrics of whole sets, and values that differ by process, of a callback."""
    x, y = rows(21)
    data = [(x[:16], y[:16]), (x[16:20], y[16:20]), (x[20:], y[20:])]
    data, index, targets = of_process(data, local), jax.process_index(), []

    def keep(predictions, labels):
        targets.append(np.asarray(labels).tolist())
        return {"rows": len(labels), "mean": predictions.mean()}

    logs = On(
        on_validation_end=lambda trainer, _: trainer.log(
            "val_own", 10.0 * index + trainer.current_epoch
        ),
        on_train_batch_end=lambda trainer, *_: trainer.log("process", index),
    )
    run = trainer(
        hooks=[logs, callbacks.EarlyStopping("val_own", patience=1)],
        model=mlp(),  # without dropout
        metrics={"accuracy": "accuracy", "kept": jaxdp.PassMetric(keep)},
        data=kind_of(local),
    )
    history = run.fit(data, data, max_epochs=4)
    names = "val_own", "process", "val_kept_rows", "val_kept_mean"
    tell(targets=targets, **{name: history[name] for name in names})


def exchanges():
    """Values, errors and votes of processes without a trainer, which go on."""
    processes, index = get_process_group(), jax.process_index()
    gathered = [processes.all_gather("a number", [index, n]) for n in range(3)]
    failing = refusal(processes.run_on_rank_zero, "a file", fail_with(OSError("full")))
    purpose = refusal(processes.check_equal, f"purpose {index}", {"x": index})
    processes.every_n_steps = 4
    steps = [
        refusal(processes.sync_step, f"step {n}", {"x": index * (n == 1)})
        for n in range(4)
    ]
    vote = PeriodicVote(processes, "whether to stop")
    votes = ((n, vote.poll(index if n > 20 else None)) for n in range(10_000))
    first = next(each for each in votes if each[1] == [0, 1])
    tell(gathered=gathered, purpose=purpose, steps=steps, vote=first)
    tell(failing=failing)


class Trial:
    """One that is pruned after two reports; the first process alone has it."""

    def __init__(self):
        self.steps = []

    def report(self, value, step):
        self.steps.append(step)

    def should_prune(self):
        return len(self.steps) == 2


def prune():
    """A fit that ends by what one process is told."""
    trial = None if jax.process_index() else Trial()
    run = trainer(hooks=[callbacks.OptunaPruning(trial, "val_loss")])
    data = [rows(16)]
    error = refusal(run.fit, data, data, max_epochs=4).partition(":")[0]
    tell(error=error, epoch=run.current_epoch, step=run.global_step)


def local(sizes):
    """Each process has rows of its own, and they end at different times."""
    index = jax.process_index()
    x, y = rows(sum(sizes))
    start = sum(sizes[:index])
    own = slice(start, start + sizes[index])
    mine = TensorDataset(torch.tensor(x[own]), torch.tensor(y[own], dtype=torch.int64))
    recorder, batches = Recorder(), []
    keeps = On(on_predict_batch_end=lambda trainer, each, _: batches.append(each))
    run = trainer(hooks=[recorder, keeps], data="local")
    before = run.validate(DataLoader(mine, 8))
    predictions = run.predict(DataLoader(mine, 8), gather=False)
    by_batch = sum(map(len, batches)), sum(float(each.sum()) for each in batches)
    everyone = run.predict(DataLoader(mine, 8))
    run.fit(DataLoader(mine, 8), max_epochs=2)
    tell(
        before=before,
        own=predictions.shape[0],
        by_batch=by_batch,
        everyone=everyone.shape[0],
        sums=[float(predictions.sum()), float(everyone.sum())],
        rows=run.run.progress.examples,
        steps=run.global_step,
        losses=recorder.losses,
        batches=run.num_training_batches,
    )
    with contextlib.suppress(ValueError):
        run.validate(DataLoader(mine, 8) if index == 0 else [])
        tell(bad=True)
    tell(good=True)


def saver(into, **options):
    return callbacks.ModelCheckpoint(
        into, every_n_train_steps=3, save_top_k=2, **options
    )


def fit(run, max_epochs=3, **options):
    """Epochs of four steps."""
    loader = DataLoader(data(), 16, shuffle=True)
    return run.fit(loader, DataLoader(data(), 16), max_epochs=max_epochs, **options)


def straight(strategy, into):
    """A run without a break; what another one does that was interrupted."""
    recorder = Recorder()
    run = trainer(strategy, [recorder, saver(into), callbacks.CSVLogger(into)])
    fit(run)
    tell(losses=recorder.losses, weights=weights_of(run))


def stopped(strategy, into, by="SIGTERM", who=1, hook="on_train_batch_end"):
    """A signal to one process: all save the same step and exit."""

    def interrupt(trainer):
        os.kill(os.getpid(), getattr(signal, by))

    # Epochs, and so validations, end with every fourth step.
    stop = here(who, 4 if "validation" in hook else 5, interrupt, hook)
    # Processes agree within five seconds, however slow the machine: five steps.
    run = trainer(strategy, [stop, slow(1.0), saver(into)])
    try:
        fit(run, max_epochs=1000)
    except BaseException as end:
        tell(end=type(end).__name__, step=run.global_step)
        raise


def resumed(strategy, into):
    recorder = Recorder()
    run = trainer(strategy, [recorder, saver(into)])
    fit(run, ckpt_path="auto")
    tell(losses=recorder.losses, weights=weights_of(run))


def spoilt(step):
    """Arrays, one batch of them NaN."""
    batches = arrays() * 4
    x, y = batches[step]
    batches[step] = (np.full_like(x, np.nan), y)
    return batches


def decisions():
    """All processes stop together, if one decides it or all by the values they see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stop = here(1, 3, lambda run: setattr(run, "should_stop", True))
        run = trainer(hooks=[slow(), stop])
        fit(run, max_epochs=10_000)
        tell(one_wants_to_stop=run.global_step)
        run = trainer(hooks=[slow()])
        fit(run, max_epochs=10_000, max_time=0.3)
        tell(max_time=run.global_step)
        run = trainer(
            hooks=[callbacks.EarlyStopping("val_loss", patience=0, min_delta=9.0)]
        )
        fit(run, max_epochs=100)
        tell(early_stopping=run.global_step)
        tell(run_id=run.record.run_id)


def bad_batches(into):
    """NaN in a batch is seen by all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard = callbacks.NanGuard("skip")
        trainer(hooks=[guard]).fit(spoilt(5), max_epochs=1)
        tell(skipped=guard.skipped_steps)
        timed = callbacks.ModelCheckpoint(
            f"{into}/timed", train_time_interval=datetime.timedelta(seconds=0.1)
        )
        trainer(hooks=[slow(), timed]).fit(arrays() * 4, max_epochs=1)
        tell(timed=timed.last_model_path)
        error = refusal(
            trainer(hooks=[callbacks.NanGuard()]).fit, spoilt(5), max_epochs=1
        )
        tell(stopped=error)


def best(into):
    """The weights of a run that is not resumed, and of one that is, at their ends."""
    weights = []
    for name, fits in {"whole": [9], "resumed": [3, 9]}.items():
        for max_epochs in fits:
            stopping = callbacks.EarlyStopping(patience=2, restore_best=True)
            saver = callbacks.ModelCheckpoint(
                f"{into}/{name}", "val_loss", save_last=True
            )
            run = trainer("FSDP", [stopping, saver, scores([3.0, 1.0, 2.0, 4.0])])
            fit(run, max_epochs, ckpt_path="auto")
        assert (run.global_step, stopping.stopped_epoch) == (16, 3)
        weights.append(weights_of(run))
    tell(weights=weights)


@contextlib.contextmanager
def hashing():
    """The names of the files that this process reads to know them again."""
    names, file_digest = [], hashlib.file_digest

    def noting(file, kind):
        names.append(re.split("/state[^/]*/", file.name)[-1])  # renamed when whole
        return file_digest(file, kind)

    hashlib.file_digest = noting
    try:
        yield names
    finally:
        hashlib.file_digest = file_digest


def files(into):
    """Saving and loading by hand, and what goes wrong with it, in all alike."""
    run = trainer("across")
    fit(run, max_epochs=1)
    with hashing() as written:
        path = run.save(f"{into}/one")
    found = {"written": written, "there already": refusal(run.save, path)}
    other = trainer("Sharded")
    with hashing() as read:
        other.load(path)
    found["read"] = read
    found["same"] = weights_of(other) == weights_of(run)
    found["nothing there"] = refusal(other.load, f"{into}/none")
    if jax.process_index() == 0:
        victim = max(
            (file for file in pathlib.Path(path, "state").rglob("*") if file.is_file()),
            key=lambda file: file.stat().st_size,
        )
        victim.write_bytes(b"rubbish" + victim.read_bytes()[7:])
    found["damaged"] = refusal(other.load, path)
    both = [f"{into}/a", f"{into}/b"]
    often = {"every_n_train_steps": 1, "save_top_k": -1}
    run = trainer(hooks=[callbacks.ModelCheckpoint(folder, **often) for folder in both])
    fit(run, max_epochs=2)
    found["two folders at once"] = [
        sum(name.isdecimal() for name in os.listdir(folder)) for folder in both
    ]
    if jax.process_index() == 0:  # as if they had died before the second one's save
        shutil.rmtree(f"{into}/b/8")
    run.run.processes.all_gather("the removal", None)
    run = trainer(hooks=[callbacks.ModelCheckpoint(folder, **often) for folder in both])
    found["nothing to do"] = refusal(fit, run, max_epochs=2, ckpt_path="auto")
    found["due"] = sorted(os.listdir(f"{into}/b"))
    found["SingleDevice"] = refusal(trainer, "SingleDevice")
    found["one process's devices"] = refusal(
        jaxdp.Trainer, Mlp(jax.random.key(0)), strategy=jaxdp.Sharded(1)
    )
    found["local, bitwise"] = refusal(trainer, "Bitwise", data="local")
    found["local, across"] = refusal(trainer, "across", data="local")
    found["compare"] = refusal(run.compare, arrays())
    tell(**found)


def quiet(into):
    """One process writes and says things."""
    bar = [callbacks.ProgressBar(file=sys.stdout)]
    run = trainer(loss=None, hooks=[callbacks.CSVLogger(into), *bar])
    fit(run, max_epochs=1)
    run.report(into)
