"""Loaders and samplers with torch's generators or a state.

They yield the same rows after a resume. Others are reported."""

import numpy as np
import pytest
from toys import Recorder, linear_on_one_device, rows

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    Sampler,
    TensorDataset,
)

X, Y = rows(24)
DATA = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


class Draws(Sampler):
    """Draws other rows in every epoch, from a generator of its own."""

    def __init__(self, count=16):
        self.generator, self.count = seeded(), count

    def __len__(self):
        return self.count

    def __iter__(self):
        for _ in range(self.count):
            yield int(torch.randint(24, (), generator=self.generator))


def make(callbacks=(), **options):
    return linear_on_one_device(*callbacks, **options)


class Tells(Sampler):
    """Draws from a generator of NumPy, and has a state."""

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


def test_a_save_inside_of_a_validation_restarts_it(tmp_path):
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
    """Counts its epochs, and has no state."""

    def __init__(self):
        self.epochs = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.epochs += 1
        return iter(np.random.default_rng(self.epochs).permutation(24).tolist())


class Seeded(Counts):
    """The number of an epoch decides its order."""

    def set_epoch(self, epoch):
        self.epochs = epoch


@pytest.mark.parametrize("sampler", [Counts, Seeded, Tells, Draws])
def test_a_sampler_without_a_saved_state_is_reported(caplog, sampler):
    loader = DataLoader(DATA, 6, sampler=sampler())
    make().validate(loader)
    assert "no checkpoint contains" not in caplog.text
    for _ in range(2):
        make().fit(loader, max_steps=1)
    texts = [r.getMessage() for r in caplog.records if "resumed run takes" in r.msg]
    assert len(texts) == (sampler is Counts)
    for part in ("`train_loader`", "Counts", "state_dict", "torch.Gen", "set_epoch"):
        assert not texts or part in texts[0]
