"""`OnDevice` changes where rows are taken from, and nothing else."""

import gc
import weakref

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, Recorder, rows

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from jaxdp import (  # noqa: E402
    FSDP,
    Callback,
    OnDevice,
    Pmap,
    Sharded,
    SingleDevice,
    Trainer,
    hlo,
)
from jaxdp.callbacks import (  # noqa: E402
    DonateBuffers,
    ModelCheckpoint,
    ThroughputMonitor,
)
from jaxdp.finders import lr_find  # noqa: E402
from jaxdp.loaders import open_loader  # noqa: E402

COUNT = 59
"""Eight batches, the last of 3 rows."""


def data(count=COUNT, seed=0):
    x, y = rows(count, seed)
    return TensorDataset(torch.from_numpy(x).double(), torch.from_numpy(y).long())


def loader(dataset=None, batch_size=8, **options):
    options = {"shuffle": True} | options
    return DataLoader(data() if dataset is None else dataset, batch_size, **options)


def as_it_is(loader):
    return loader


def make(*callbacks, model=None, strategy=None, **options):
    return Trainer(
        Mlp(jax.random.key(0)) if model is None else model,
        optax.adam(1e-2),
        strategy=SingleDevice() if strategy is None else strategy,
        loss="cross_entropy",
        callbacks=callbacks,
        enable_progress_bar=False,
        **options,
    )


def results(trainer):
    """The history, and the whole state to the bit."""
    leaves = jax.tree.leaves(trainer.state)
    return trainer.history.state_dict(), [np.asarray(leaf).tobytes() for leaf in leaves]


CASES = {
    "SingleDevice": {"strategy": SingleDevice},
    "Sharded": {"strategy": Sharded, "steps_per_execution": 4},
    "Pmap": {"strategy": Pmap, "accumulate_grad_batches": 2, "steps_per_execution": 4},
    "FSDP": {"strategy": FSDP, "accumulate_grad_batches": 2},
    "bitwise": {"strategy": lambda: Sharded(4), "reproducible": "bitwise"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_loader(name):
    def run(wrap):
        options = CASES[name] | {"strategy": CASES[name]["strategy"]()}
        recorder = Recorder()
        trainer = make(recorder, **options, metrics=["accuracy"])
        val = wrap(loader(data(21, seed=1), shuffle=False))
        trainer.fit(wrap(loader()), val, max_epochs=2)
        return recorder.losses, results(trainer), trainer.test(val)

    assert run(OnDevice) == run(as_it_is)


def test_rows_that_interact_run_at_their_size():
    def run(wrap):
        model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
        trainer = make(model=model, state=state, strategy=Sharded(2))
        trainer.fit(wrap(loader()), max_epochs=2)
        return results(trainer)

    assert run(OnDevice) == run(as_it_is)


def test_a_run_killed_inside_an_epoch_goes_on(tmp_path):
    class Kill(Callback):
        def on_boundary(self, trainer):
            if trainer.global_step == 14:
                raise OSError("killed")

    whole = make()
    whole.fit(loader(), max_epochs=3)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5)
    with pytest.raises(OSError, match="killed"):
        make(saver, Kill()).fit(OnDevice(loader()), max_epochs=3)
    again = make(ModelCheckpoint(tmp_path))
    again.fit(OnDevice(loader()), max_epochs=3, ckpt_path="last")
    assert results(again) == results(whole)
    assert again.global_step == 24


SUBSET = Subset(data(), range(50, 3, -1))


@pytest.mark.parametrize("dataset", [data(), SUBSET, Subset(SUBSET, [5, -1, 5, 0] * 6)])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 4, "shuffle": True, "generator": torch.Generator()},
        {"batch_size": 4, "shuffle": True, "num_workers": 2},
        {"batch_size": 4, "sampler": RandomSampler(range(17), replacement=True)},
        {"batch_size": 4, "sampler": WeightedRandomSampler([0.1] * 17, 30)},
        {"batch_size": 4, "sampler": [5, -3, 1, 1, 2]},
        {"batch_sampler": [[1, 2], [3], torch.tensor([4, 5, 6])]},
    ],
)
def test_batches_are_those_of_the_loader(dataset, options):
    def host(wrap, epoch, skip, **others):
        if "generator" in options:
            others["generator"] = torch.Generator().manual_seed(5)
        source = open_loader(
            wrap(DataLoader(dataset, **(options | others))), "train_loader", seed=7
        )
        batches = list(source.epoch(epoch, skip=skip))
        assert source.num_batches == len(batches) + skip
        return batches

    for epoch, skip in ((0, 0), (1, 1)):
        ours = host(OnDevice, epoch, skip)
        theirs = host(as_it_is, epoch, skip, num_workers=0)
        assert len(ours) == len(theirs) > 0
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine.indices.dtype == np.int32
            for a, b in zip(mine.own, yours, strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


def test_a_sampler_that_names_no_row_gets_the_error_of_the_loader():
    bad = loader(sampler=[0, 1, COUNT], batch_size=2, shuffle=False)
    trainer = make()
    with pytest.raises(IndexError) as error:
        trainer.fit(OnDevice(bad))
    assert trainer.global_step == 1
    assert "in batch 1 of epoch 0 of `train_loader`" in error.value.__notes__


def test_labels_out_of_range_are_found_before_their_step():
    def message(wrap):
        dataset = data()
        dataset.tensors[1][40] = 3
        trainer = make()
        with pytest.raises(ValueError, match="labels must be 0 to 2") as error:
            trainer.fit(wrap(loader(dataset)))
        return str(error.value), trainer.global_step

    assert message(OnDevice) == message(as_it_is)


def test_64_bits_are_narrowed_or_refused():
    x, y = OnDevice(loader()).columns.host
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    wide = TensorDataset(torch.zeros(3, 4), torch.tensor([0, 1, 2**40]))
    with pytest.raises(ValueError, match=r"batch\[1\] is int64 .* does not fit into"):
        OnDevice(loader(wide))


def held(shape):
    """How many arrays of the shape there are on devices."""
    gc.collect()
    return sum(array.shape == shape for array in jax.live_arrays())


def test_columns_are_placed_once_and_kept_until_the_loader_goes():
    strategy = FSDP()
    trainer = make(DonateBuffers("all"), strategy=strategy)
    train, other = OnDevice(loader(data(89))), OnDevice(loader(data(97)))
    assert held((89, 4)) == 0
    trainer.fit(train, train, max_epochs=2)
    (x,) = (array for array in jax.live_arrays() if array.shape == (89, 4))
    assert x.is_fully_replicated
    assert len(x.sharding.device_set) == 8
    trainer.fit(train, max_epochs=3)
    trainer.predict(train)
    make(strategy=strategy).fit(train)  # on the same devices
    assert held((89, 4)) == 1
    assert any(array is x for array in jax.live_arrays())
    del train, x
    trainer.fit(other, max_epochs=4)
    trainer.validate(other)
    trainer.predict(other)
    assert (held((89, 4)), held((97, 4))) == (0, 1)


def test_a_loader_keeps_no_program_of_a_trainer_that_is_gone():
    train, programs = OnDevice(loader(data(89))), []
    for _ in range(2):
        trainer = make()
        trainer.fit(train)
        programs.append(weakref.ref(trainer.compiled_train_step()))
    del trainer
    gc.collect()
    assert [program() for program in programs] == [None, None]


class Watched(SingleDevice):
    """Notes what is handed to a step from the host."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def place_batch(self, groups, *, split):
        leaves = jax.tree.leaves([group.batch for group in groups])
        self.seen |= {(leaf.shape, leaf.dtype.name) for leaf in leaves}
        return groups


def test_a_step_is_handed_row_numbers_alone():
    strategy = Watched()
    trainer = make(strategy=strategy)
    batches = OnDevice(loader())
    trainer.fit(batches, batches, max_epochs=2)
    trainer.predict(batches)
    assert strategy.seen == {((1, 8), "int32")}


@pytest.mark.parametrize("options", [{}, {"reproducible": "bitwise"}])
def test_devices_take_their_rows_without_talking(options):
    batches = OnDevice(loader())
    trainer = make(strategy=Sharded(), **options)
    trainer.fit(batches)
    (taker,) = batches.columns._takers.values()
    program = hlo.read(taker.func.as_text())
    assert program.num_partitions == 8
    assert program.collectives == ()


class Batches(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, batch, batch_idx):
        for x, y in batch:
            assert isinstance(x, np.ndarray)
            self.seen.append((x.tolist(), y.tolist()))


def test_hooks_see_the_rows_on_the_host():
    def run(wrap):
        batches = Batches()
        monitor = ThroughputMonitor()  # traces the step for such a batch
        trainer = make(batches, monitor, accumulate_grad_batches=2)
        trainer.fit(wrap(loader(drop_last=True)))
        return batches.seen, results(trainer)

    assert run(OnDevice) == run(as_it_is)


def test_a_trainer_takes_rows_from_the_host_and_from_devices_in_turn():
    traces = []

    def loss(model, x, y):
        traces.append(x.shape)
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    def run(*wraps):
        trainer = Trainer(
            Mlp(jax.random.key(0), rate=0.0),
            strategy=SingleDevice(),
            loss_fn=loss,
            enable_progress_bar=False,
        )
        before = len(traces)
        for epoch, wrap in enumerate(wraps, 1):
            trainer.fit(wrap(loader()), max_epochs=epoch)
        found = [
            trainer.validate(wrap(loader(data(21, seed))))
            for seed, wrap in enumerate(wraps, 1)
        ]
        return results(trainer), found, len(traces) - before

    host = run(as_it_is, as_it_is, as_it_is)
    assert run(OnDevice, as_it_is, OnDevice) == host
    assert run(as_it_is, OnDevice, OnDevice) == host


def test_rows_of_another_form_are_named():
    trainer = make()
    trainer.fit(loader())
    wide = TensorDataset(torch.zeros(8, 5), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"batch\[0\] was float32 \(rows, 4\), is fl"):
        trainer.fit(OnDevice(loader(wide)), max_epochs=2)


def test_all_that_takes_a_loader_takes_it():
    def run(wrap):
        trainer = make()
        batches = wrap(loader(generator=torch.Generator().manual_seed(3)))
        found = lr_find(trainer, batches, num_training=15).results
        plan = trainer.plan(batches)
        trainer.fit(batches, overfit_batches=2, max_epochs=2)
        for metrics in trainer.steps(batches):
            last = float(metrics["loss"])
        compared = trainer.compare(batches, steps=2)
        losses = compared.reference.losses + compared.runs[0].losses
        y = trainer.predict(wrap(loader(shuffle=False)))
        return found, plan.traffic, last, losses, y.tolist(), results(trainer)

    assert run(OnDevice) == run(as_it_is)


class Own(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(4), 0


class Tensors(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor[index] for tensor in self.tensors)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class Twice(DataLoader):
    def __iter__(self):
        yield from [*super().__iter__(), *super().__iter__()]


@pytest.mark.parametrize("wrong, error, message", [
    (rows(4), TypeError, "`loader` is a tuple. `OnDevice` takes a torch DataLoader ov"),
    ([rows(4)], TypeError, "`loader` is a list. `OnDevice` takes a torch DataLoader"),
    (data(), TypeError, "`loader` is a TensorDataset. `OnDevice` takes a torch DataLo"),
    (DataLoader(Own()), TypeError, "has a data set of type Own, and only tensors can"),
    (DataLoader(Subset(Own(), [1])), TypeError, "a data set of type Own, and only ten"),
    (DataLoader(Tensors(torch.zeros(4, 4))), TypeError, "has a data set of type Tens"),
    (DataLoader(Stream(), 2), ValueError, "over a Stream, and one of the two iterates"),
    (Twice(data()), ValueError, "`loader` is a Twice over a TensorDataset, and one of"),
    (DataLoader(data(), collate_fn=list), ValueError, "a `collate_fn` of its own"),
    (DataLoader(data(), batch_size=None), ValueError, "no batches .batch_size=None."),
    (DataLoader(data(0)), ValueError, "`loader` has a data set without rows"),
    (DataLoader(Subset(data(), [])), ValueError, "has a data set without rows"),
    (DataLoader(Subset(data(3), [3])), ValueError, "a Subset of rows that are not th"),
])  # fmt: skip
def test_what_it_can_not_hold_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        OnDevice(wrong)


def test_it_tells_what_it_holds():
    batches = OnDevice(loader())
    assert repr(batches) == f"OnDevice({COUNT} rows, 0.0 MB)"
    assert len(list(batches)) == len(batches) == 8
