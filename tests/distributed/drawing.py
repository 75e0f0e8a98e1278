"""Samplers with generators of their own, in several processes."""

import torch
from together import data, tell, trainer
from torch.utils.data import DataLoader, Sampler
from toys import Recorder
from twins import Saves


class Draws(Sampler):
    def __init__(self, count):
        self.generator, self.count = torch.Generator().manual_seed(3), count

    def __len__(self):
        return self.count

    def __iter__(self):
        drawn = torch.randint(self.count, (self.count,), generator=self.generator)
        return iter(drawn.tolist())


def fit(run, recorder, **options):
    """The losses of two epochs, or of what is left of them."""
    recorder.losses.clear()
    loader = DataLoader(data(32), 8, sampler=Draws(32))
    val = DataLoader(data(16), 8, sampler=Draws(16))
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
