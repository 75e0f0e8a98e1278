"""Loaders and samplers with generators of torch, and samplers that tell their state.

They give the same rows on resume. Other orders are noticed."""

import warnings

import numpy as np
import pytest
from toys import Recorder, linear_on_one_device, rows
from twins import check_twins

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from jaxdp.data import Position, open_loader  # noqa: E402
from jaxdp.data.random_states import states_of, torch_generators  # noqa: E402
from jaxdp.data.torch_source import noted  # noqa: E402

X, Y = rows(24)
DATA = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


class Draws(Sampler):
    """Rows drawn with a generator of its own, at every epoch others."""

    def __init__(self, count=16):
        self.generator, self.count = seeded(), count

    def __len__(self):
        return self.count

    def __iter__(self):
        for _ in range(self.count):
            yield int(torch.randint(24, (), generator=self.generator))


def make(callbacks=(), **options):
    return linear_on_one_device(*callbacks, **options)


def check_runs(folder, loaders, which, **settings):
    """Runs go on from boundaries of one as it went on itself."""

    def fit(trainer, **more):
        train, val = loaders()
        trainer.fit(train, val, **{"max_epochs": 2} | settings | more)

    check_twins(folder, make, fit, which)


class Tells(Sampler):
    """Draws with a generator of NumPy, and tells."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 16

    def __iter__(self):
        return iter(self.generator.permutation(24)[:16].tolist())

    def state_dict(self):
        return self.generator.bit_generator.state

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state


def test_a_validation_goes_on_with_a_generator_of_its_own(tmp_path):
    def loaders():
        train = DataLoader(DATA, 6, shuffle=True)
        return train, DataLoader(DATA, 6, shuffle=True, generator=seeded())

    check_runs(tmp_path, loaders, (4, 5, 8), limit_val_batches=2)


def test_a_save_inside_of_a_validation_has_it_begin_again(tmp_path):
    class Saves(Recorder):
        path = None

        def on_validation_batch_end(self, trainer, batch_idx):
            if batch_idx == 1 and trainer.current_epoch == 1 and self.path is None:
                self.path = trainer.save(tmp_path / "inside")

    def loaders():
        return DataLoader(DATA, 6), DataLoader(DATA, 6, True, generator=seeded())

    saves = Saves()
    whole, again = make([saves]), make()
    whole.fit(*loaders(), max_epochs=3, limit_val_batches=3)
    again.fit(*loaders(), max_epochs=3, limit_val_batches=3, ckpt_path=saves.path)
    assert again.history.state_dict() == whole.history.state_dict()


class Counts(Sampler):
    """Counts its epochs, and tells nobody."""

    def __init__(self):
        self.epochs = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.epochs += 1
        return iter(np.random.default_rng(self.epochs).permutation(24).tolist())


class Numpys(Counts):
    """Draws with a generator of NumPy, and tells nobody."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __iter__(self):
        return iter(self.generator.permutation(24).tolist())


class Same(Counts):
    """The same order in every epoch."""

    def __iter__(self):
        return iter(range(23, -1, -1))


def resumed_after(steps, tmp_path, sampler, until=12):
    """What a run that was saved after so many steps warns of, and one that was not."""
    first, again = make(), make()
    first.fit(DataLoader(DATA, 6, sampler=sampler()), max_steps=steps, max_epochs=9)
    path = first.save(tmp_path / str(steps))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loader = DataLoader(DATA, 6, sampler=sampler())
        again.fit(loader, max_steps=until, max_epochs=9, ckpt_path=path)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("sampler", [Counts, Numpys])
@pytest.mark.parametrize("steps", [6, 10])
def test_other_rows_after_a_resume_are_noticed(tmp_path, steps, sampler):
    (message,) = resumed_after(steps, tmp_path, sampler, until=steps + 8)
    name = sampler.__name__
    for part in ("`train_loader`", name, "state_dict", "torch.Gen", "set_epoch"):
        assert part in message


@pytest.mark.slow_but("Same-2", "Tells-6", "<lambda>-8")
@pytest.mark.parametrize("steps", [2, 6, 8])
@pytest.mark.parametrize("sampler", [Same, Tells, lambda: Draws(24)])
def test_the_same_rows_after_a_resume_are_no_cause_for_alarm(tmp_path, steps, sampler):
    assert resumed_after(steps, tmp_path, sampler) == []


def test_index_lists_are_noted_by_their_numbers():
    for kind in (int, np.int64, torch.tensor):
        first, second = [kind(3), kind(1)], [kind(2), kind(0)]
        assert noted(second, noted(first, 0)) != noted(first, noted(second, 0))
    of_each_kind = [3, 1], np.array([3, 1]), [np.int64(3), 1], torch.tensor([3, 1])
    assert len({noted(indices, 0) for indices in of_each_kind}) == 1
    assert noted([1], noted([object()], 0)) is None


def test_each_generator_is_found_once_by_its_path():
    shared = seeded()
    inner = RandomSampler(DATA, generator=shared)
    loader = DataLoader(DATA, batch_sampler=BatchSampler(inner, 6, False))
    assert torch_generators(loader) == {"batch_sampler.sampler.generator": shared}
    loader = DataLoader(DATA, 6, sampler=inner, generator=shared)
    assert torch_generators(loader) == {"generator": shared}
    loader = DataLoader(DATA, 6, shuffle=True, generator=torch.default_generator)
    assert torch_generators(loader) == torch_generators([DATA]) == {}


def test_generators_of_other_kinds_in_an_older_checkpoint_are_passed_over():
    source = open_loader(DataLoader(DATA, 6, sampler=Draws()), "loader", 0)
    before = states_of(torch_generators(source.loader))
    other = {"kind": "PCG64", "state": {"bit_generator": "PCG64"}}
    states = {"sampler.gone": other, "sampler.generator": other}
    source.epoch(Position(state={"generators": states}))
    assert states_of(torch_generators(source.loader)) == before
