"""Loaders that tell their position: they are asked, and where it is right, believed."""

import itertools
import json
import random
import time

import numpy as np
import optax
import pytest
from toys import Recorder, batches, linear_on_one_device, rows
from twins import check_twins

from jaxdp.data import open_loader
from jaxdp.data.loader_state import _decoded, _encoded

DATA = batches(*[8] * 12)


def make(*callbacks, **options):
    return linear_on_one_device(*callbacks, optimizer=optax.sgd(1e-2), **options)


def check(tmp_path, make_loader, which, reads=False, **settings):
    """Runs go on from boundaries of one as it went on itself."""
    options = settings.pop("options", {})
    settings = {"max_epochs": 2} | settings

    def fit(trainer, **more):
        loader = make_loader()
        trainer.fit(loader, **settings, **more)
        return loader

    def few(loader, step):
        assert not reads or loader.reads <= 24 - step + 12

    check_twins(tmp_path, lambda c: make(*c, **options), fit, which, few)


class Stream:
    """Goes on where it was, and draws the order of every pass as it begins."""

    def __init__(self):
        self.at, self.reads = 0, 0
        self.generator = np.random.default_rng(0)
        self.order = self.generator.permutation(len(DATA))

    def __iter__(self):
        while self.at < len(DATA):
            self.at += 1
            self.reads += 1
            yield DATA[self.order[self.at - 1]]
        self.at, self.order = 0, self.generator.permutation(len(DATA))

    def state_dict(self):
        return {
            "at": self.at,
            "order": self.order,
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]
        self.generator.bit_generator.state = state["generator"]


class Endless(Stream):
    """An iterator: one pass that never ends."""

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        self.reads += 1
        return DATA[self.order[self.at % len(DATA)]]


@pytest.mark.parametrize("kind", [Stream, Endless])
def test_an_iterable_that_can_tell_is_not_replayed(tmp_path, kind):
    settings = {"limit_train_batches": 12} if kind is Endless else {}
    # 13 is the end of the first epoch.
    check(tmp_path, kind, {5, 13}, reads=True, **settings)


def test_what_is_read_ahead_is_not_taken_for_trained(tmp_path):
    options = {"accumulate_grad_batches": 2, "steps_per_execution": 3}
    check(tmp_path, Stream, {2, 6, 9}, options=options)


def test_a_second_fit_goes_on_where_the_first_one_was_trained_to():
    whole, parts = Recorder(), Recorder()
    make(whole).fit(Stream(), max_epochs=2)
    trainer, loader = make(parts), Stream()
    for steps in (5, 12, 14):
        trainer.fit(loader, max_steps=steps)
    trainer.fit(loader, max_epochs=2)
    assert parts.losses == whole.losses


def test_a_plan_leaves_the_loader_as_it_was():
    whole, planned, loader = Recorder(), Recorder(), Stream()
    make(whole).fit(Stream())
    trainer = make(planned)
    trainer.plan(loader)
    trainer.fit(loader)
    assert planned.losses == whole.losses


class Shuffled(Stream):
    """Rows wait in a buffer that is no part of the state."""

    def __init__(self):
        super().__init__()
        self.buffer = []

    def __iter__(self):
        rows, draw = super().__iter__(), random.Random(0)
        self.buffer = list(itertools.islice(rows, 4))
        for row in rows:
            place = draw.randrange(4)
            self.buffer[place], row = row, self.buffer[place]
            yield row
        yield from self.buffer


def test_a_state_that_does_not_lead_back_is_noticed(tmp_path):
    with pytest.warns(UserWarning, match="did not lead back to batch .*a shuffle buf"):
        check(tmp_path, Shuffled, {4, 17})


def test_a_state_that_json_cannot_hold_is_replayed(tmp_path, caplog):
    class Odd(Stream):
        def state_dict(self):
            return {"at": object()}

        def __iter__(self):
            return iter(DATA)

    check(tmp_path, Odd, {5})
    assert "has a builtins.object in it, which can't be saved" in caplog.text


def test_states_are_asked_for_as_often_as_is_cheap():
    class Slow(Stream):
        asked = 0

        def state_dict(self):
            self.asked += 1
            time.sleep(0.01)
            return super().state_dict()

    loader = Slow()
    source = open_loader(loader, "train_loader", 0)
    source.to_train = True
    list(source.epoch())
    source.trained_on(5)
    assert loader.asked == 2  # what the epoch starts from, and before batch 0
    assert source.mark(0, 5).place["batches"] == 0
    assert source.mark(0, 0).place is None


def torch_stream():
    """An iterable dataset that can tell, with noise from a global generator."""
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.IterableDataset):
        at = 0

        def __iter__(self):
            x, y = rows(96)
            while self.at < 96:
                self.at += 1
                yield x[self.at - 1] + torch.rand(4).numpy(), int(y[self.at - 1])
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    return torch, Rows


def stateful_loader():
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader


def test_an_iterable_dataset_that_can_tell(tmp_path):
    torch, dataset = torch_stream()
    check(tmp_path, lambda: torch.utils.data.DataLoader(dataset(), 8), {5, 13})


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("kind", ["iterable dataset", "its iterator", "map dataset"])
def test_torchdatas_loader_is_asked(tmp_path, kind):
    """Whose next epoch comes out wrong after a resumed one, if nothing is done."""
    torch, dataset = torch_stream()

    class Handed(torch.utils.data.IterableDataset):
        def __iter__(self):
            return Passing(dataset())

    class Passing:
        def __init__(self, parent):
            self.parent, self.rows = parent, iter(parent)
            self.state_dict, self.load_state_dict = parent.state_dict, self.load

        def load(self, state):
            self.parent.load_state_dict(state)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.rows)

    class Items(torch.utils.data.Dataset):
        def __getitem__(self, i):
            return rows(96)[0][i] + torch.rand(4).numpy(), i % 3

        def __len__(self):
            return 96

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def make_loader():
        if kind == "map dataset":
            generator = torch.Generator().manual_seed(2)
            return stateful_loader()(Items(), 8, shuffle=True, generator=generator)
        return stateful_loader()(dataset() if "data" in kind else Handed(), 8)

    check(tmp_path, make_loader, {5, 13})


def numbered(items):
    x, y = rows(96)
    numbers = [item["number"] for item in items]
    return x[numbers], y[numbers]


@pytest.mark.slow_cases("torch's-False", "torchdata's-True")
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kind", ["torch's", "torchdata's"])
def test_datasets_of_huggingface_are_asked(tmp_path, kind, shuffled):
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("datasets")

    def make_loader():
        dataset = datasets.Dataset.from_dict({"number": list(range(96))})
        dataset = dataset.to_iterable_dataset(num_shards=2)
        if shuffled:
            dataset = dataset.shuffle(seed=0, buffer_size=20)
        make = torch.utils.data.DataLoader if kind == "torch's" else stateful_loader()
        return make(dataset, 8, collate_fn=numbered)

    if shuffled:
        with pytest.warns(UserWarning, match="did not lead back"):
            check(tmp_path, make_loader, {5, 20})
    else:
        check(tmp_path, make_loader, {5, 13})


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "b": (1, (2,)), 3: b"\x00\xff", (1, 2): {}},
        {"__jaxdp__": "tuple"},
        2**100,
        {"x": bytearray(b"abc")},
    ],
)
def test_states_survive_json(value):
    found = _decoded(json.loads(json.dumps(_encoded(value))))
    assert found == value and type(found) is type(value)


def test_arrays_and_generators_survive_json():
    torch = pytest.importorskip("torch")
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    found = _decoded(_encoded(states))
    assert (found[0] == states[0]).all() and found[2] == states[2]
    for ours, theirs in zip(found[1], states[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert _decoded(_encoded(np.float32(1.5))).dtype == np.float32
    with pytest.raises(TypeError, match="Random"):
        _encoded(random.Random())


class Iterations:
    """Of the protocol of Grain's datasets: each iteration can tell where it is."""

    __module__ = "grain.stand_in"
    reads = 0

    def __iter__(self):
        return Iteration(self)


class Iteration:
    """An iteration, or a loader by itself."""

    def __init__(self, counted=None, count=12):
        self.at, self.count, self.counted = 0, count, counted or self
        self.reads = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        self.counted.reads += 1
        return DATA[(5 * self.at) % len(DATA)]

    def get_state(self):
        return {"next_index": self.at, "told": b"by bytes"}

    def set_state(self, state):
        assert state["told"] == b"by bytes"
        self.at = state["next_index"]


@pytest.mark.parametrize("kind", [Iterations, lambda: Iteration(count=24)])
def test_iterators_with_get_state_are_not_replayed(tmp_path, kind):
    settings = {} if kind is Iterations else {"limit_train_batches": 12}
    check(tmp_path, kind, {5, 13}, reads=True, **settings)


@pytest.mark.slow_cases("iter", "iterator")
@pytest.mark.parametrize("kind", ["map", "iter", "iterator", "loader"])
def test_grains_datasets_and_loaders_are_asked(tmp_path, kind):
    grain = pytest.importorskip("grain")
    x, y = rows(96)
    items = [(x[i], y[i]) for i in range(96)]

    def make_loader():
        if kind == "loader":
            sampler = grain.samplers.IndexSampler(
                96, shuffle=True, seed=0, num_epochs=1
            )
            batch = grain.transforms.Batch(8)
            return grain.DataLoader(
                data_source=items, sampler=sampler, operations=[batch]
            )
        dataset = grain.MapDataset.source(items).shuffle(seed=1)
        if kind == "map":
            return dataset.batch(8)
        if kind == "iter":
            return dataset.to_iter_dataset().batch(8)
        return iter(dataset.repeat().batch(8).to_iter_dataset())

    settings = {"limit_train_batches": 12} if kind == "iterator" else {}
    check(tmp_path, make_loader, {5, 13}, **settings)
