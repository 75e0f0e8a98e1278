"""Samplers and datasets with generators of their own, in several processes."""

import numpy as np
from together import data, tell, trainer
from torch.utils.data import DataLoader, Dataset, Sampler
from toys import Recorder
from twins import Saves


class Draws(Sampler):
    def __init__(self, count):
        self.generator, self.count = np.random.default_rng(3), count

    def __len__(self):
        return self.count

    def __iter__(self):
        return (int(self.generator.integers(self.count)) for _ in range(self.count))


class Noisy(Dataset):
    """In a job of several processes each draws for the rows that it loads."""

    def __init__(self, rows):
        self.rows, self.generator = rows, np.random.default_rng(5)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return x + np.float32(self.generator.normal()), y


def fit(run, recorder, **options):
    """The losses of two epochs, or of what is left of them."""
    recorder.losses.clear()
    rows = Noisy(data(32))
    loader = DataLoader(rows, 8, sampler=Draws(len(rows)))
    val = DataLoader(Noisy(data(16)), 8, sampler=Draws(16))
    run.fit(loader, val, max_epochs=2, **options)
    return [*recorder.losses, *run.history["val_loss"]]


def resumes(into):
    """The losses of runs, and of what goes on from checkpoints of them."""
    for kind in "global", "local":
        saves, recorder = Saves(f"{into}/{kind}", (2, 7)), Recorder()
        whole = fit(trainer(callbacks=[recorder, saves], data=kind), recorder)
        tell(kind=kind, whole=whole)
        again = trainer(callbacks=[recorder], data=kind)
        for path, step in saves.paths.items():
            found = fit(again, recorder, ckpt_path=path)
            tell(kind=kind, expected=whole[step:], found=found)
