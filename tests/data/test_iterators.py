"""Iterators of any kind resume from a checkpoint with the batches that would follow."""

import itertools

import numpy as np
import pytest
from toys import Recorder, batches, linear_on_one_device
from twins import check_twins

DATA = batches(*[2] * 20)


class RestartsAtItsEnd:
    """Has five other batches in each pass, or more."""

    at, size = 0, 5

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at % (self.size + 1) == 0:
            raise StopIteration
        return DATA[self.at % 20]


class RestartsInIter(RestartsAtItsEnd):
    """Has the same batches in each pass."""

    def __iter__(self):
        self.at = 0
        return self


class Reseeded(RestartsAtItsEnd):
    """The number of an epoch decides its batches."""

    def set_epoch(self, epoch):
        self.at = (self.size + 1) * epoch


class Stated:
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class ArrayStated(Stated):
    """Has a state that JSON can't hold."""

    def state_dict(self):
        return {"at": np.array(self.at)}


class Noisy(RestartsAtItsEnd):
    """Draws from a global generator, which is seeded for torch's datasets."""

    def __next__(self):
        x, y = super().__next__()
        return x + np.random.normal(size=x.shape).astype(x.dtype), y  # noqa: NPY002


def combine(*kinds):
    return type("And".join(kind.__name__ for kind in kinds), kinds, {})


KINDS = {
    kind.__name__: kind
    for way in (RestartsAtItsEnd, RestartsInIter, Reseeded)
    for kind in (way, combine(ArrayStated, way), combine(Stated, way))
} | {
    "a generator": lambda: (batch for batch in DATA),
    "itertools": lambda: itertools.cycle(DATA[:7]),
    "torch's": lambda: combine(
        Noisy, pytest.importorskip("torch").utils.data.IterableDataset
    )(),
}


def fit_once(trainer, loader, **options):
    trainer.fit(loader, max_epochs=3, **options)


def fit_in_parts(trainer, loader, ckpt_path=None, **options):
    if ckpt_path is None:
        trainer.fit(loader, max_steps=2, **options)
    trainer.fit(loader, max_epochs=3, ckpt_path=ckpt_path, **options)


def fit_a_list_before(trainer, loader, ckpt_path=None, **options):
    if ckpt_path is None:
        trainer.fit(DATA[:4], max_epochs=1)
    trainer.fit(loader, max_epochs=3, ckpt_path=ckpt_path, **options)


def validate(trainer, loader, limit_train_batches, **options):
    options |= {"max_epochs": 4, "limit_val_batches": limit_train_batches}
    trainer.fit(DATA[:2], loader, **options)


WAYS = {
    "one fit": (fit_once, None),
    "one fit, limited": (fit_once, 3),
    "two fits": (fit_in_parts, None),
    "after a list": (fit_a_list_before, None),
    "validations": (validate, None),
    "validations, limited": (validate, 3),
}
QUICK = [
    ("RestartsAtItsEnd", "one fit"),
    ("RestartsInIter", "one fit, limited"),
    ("RestartsInIter", "two fits"),
    ("Reseeded", "one fit, limited"),
    ("ArrayStatedAndRestartsAtItsEnd", "after a list"),
    ("StatedAndRestartsInIter", "two fits"),
    ("RestartsAtItsEnd", "validations"),
    ("itertools", "validations, limited"),
    ("torch's", "one fit"),
]


@pytest.mark.parametrize("kind, way", [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
    for case in itertools.product(KINDS, WAYS)
])  # fmt: skip
def test_an_iterator_resumes(tmp_path, kind, way):
    run, limit = WAYS[way]
    if kind in ("a generator", "itertools"):
        limit = limit or 4

    def fit(trainer, **options):
        run(trainer, KINDS[kind](), limit_train_batches=limit, **options)

    # Inside an epoch and at its end, before and after it is known to be the end.
    moments = {7, 10, 11} if run is fit_a_list_before else {2, 5, 6, 8}
    check_twins(tmp_path, make, fit, moments)


def make(callbacks):
    return linear_on_one_device(*callbacks)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_fit_continues_where_an_iterator_is(kind):
    def train(*limits):
        trainer, loader = make([recorder := Recorder()]), KINDS[kind]()
        for steps in limits:
            trainer.fit(loader, max_steps=steps, limit_train_batches=4)
        return recorder.losses

    assert train(2, 3, 4, 7, 10) == train(10)


class Long(RestartsInIter, Stated):
    size = 40


def test_a_state_that_iter_resets_is_not_continued_from(tmp_path):
    def fit(trainer, **options):
        trainer.fit(Long(), max_epochs=1, **options)

    check_twins(tmp_path, make, fit, {35})
