"""Loaders with a state resume from it. `test_twins.py` has others of them."""

import optax
import pytest
from test_twins import Telling
from toys import Recorder, batches, linear_on_one_device, rows
from twins import check_twins

DATA = batches(*[2] * 48)


def make(callbacks):
    return linear_on_one_device(*callbacks, optimizer=optax.sgd(1e-2))


def check(tmp_path, make_loader, which):
    """Checks that runs resume from steps of one run as that continued."""

    def fit(trainer, **more):
        trainer.fit(make_loader(), max_epochs=2, **more)

    check_twins(tmp_path, make, fit, which)


class Stream(Telling):
    data = DATA


class Endless(Stream):
    """An iterator: one pass that never ends."""

    def __iter__(self):
        return self

    def __next__(self):
        self.at, self.reads = self.at + 1, self.reads + 1
        return DATA[self.order[self.at % len(DATA)]]


@pytest.mark.parametrize("kind", [Stream, Endless])
def test_a_long_epoch_resumes_from_the_newest_state(tmp_path, kind):
    def fit(**options):
        trainer, loader = make([recorder := Recorder()]), kind()
        trainer.fit(loader, limit_train_batches=45, **options)
        return trainer, loader, recorder.losses

    path = fit(max_steps=40)[0].save(tmp_path / "saved")
    _, loader, losses = fit(ckpt_path=path)
    assert losses == fit()[2][40:]
    assert loader.reads == 45 - 32  # a waypoint is before every 16th batch


def test_a_second_fit_continues_at_the_trained_position():
    whole, parts = Recorder(), Recorder()
    make([whole]).fit(Stream(), max_epochs=2)
    trainer, loader = make([parts]), Stream()
    trainer.plan(loader)  # leaves the loader as it was
    for steps in (20, 48, 60):
        trainer.fit(loader, max_steps=steps)
    trainer.fit(loader, max_epochs=2)
    assert parts.losses == whole.losses


class InOrder(Stream):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize("kind, other, which", [
    (InOrder, {"at": object()}, {4, 15}), (Endless, {1: 0}, {4}), (Endless, None, {15}),
])  # fmt: skip
def test_a_state_that_is_not_json_is_replayed(tmp_path, caplog, kind, other, which):
    state = {"state_dict": lambda self: other} if other else {}
    name = f"Odd{kind.__name__}"  # each is reported once
    odd = type(name, (kind,), state)

    def fit(trainer, **options):
        trainer.fit(odd(), max_epochs=2, limit_train_batches=10, **options)

    check_twins(tmp_path, make, fit, which)
    assert (f"the state of {name} is not JSON" in caplog.text) == bool(other)


def torch_stream():
    """Returns an iterable dataset with a state and noise of a global generator."""
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


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("kind", ["torch's", "iterable dataset", "map dataset"])
def test_iterable_datasets_and_loaders_of_torchdata_resume(tmp_path, kind):
    """torchdata's own next epoch after a resumed one is wrong."""
    torch, dataset = torch_stream()

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
        if kind == "torch's":
            return torch.utils.data.DataLoader(dataset(), 2)
        if kind == "map dataset":
            generator = torch.Generator().manual_seed(2)
            return stateful_loader()(Items(), 2, shuffle=True, generator=generator)
        return stateful_loader()(dataset(), 2)

    check(tmp_path, make_loader, {20, 49})


def numbered(items):
    x, y = rows(96)
    numbers = [item["number"] for item in items]
    return x[numbers], y[numbers]


@pytest.mark.slow_cases("torchdata's")
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("kind", ["torch's", "torchdata's"])
def test_datasets_of_huggingface_resume(tmp_path, kind):
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("datasets")

    def make_loader():
        dataset = datasets.Dataset.from_dict({"number": list(range(96))})
        dataset = dataset.to_iterable_dataset(num_shards=2)
        make = torch.utils.data.DataLoader if kind == "torch's" else stateful_loader()
        return make(dataset, 2, collate_fn=numbered)

    check(tmp_path, make_loader, {20, 49})
