"""Iterators resume with the batches that would follow, or are refused."""

import itertools

import numpy as np
import pytest
from toys import Recorder, batches, linear_on_one_device
from twins import Saves, check_twins

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


RESTARTING = RestartsAtItsEnd, RestartsInIter, Reseeded
EXACT = {
    "a generator": lambda: (batch for batch in DATA),
    "itertools": lambda: itertools.cycle(DATA[:7]),
} | {kind.__name__: kind for kind in (combine(Stated, way) for way in RESTARTING)}
OTHERS = {
    kind.__name__: kind
    for way in RESTARTING
    for kind in (way, combine(ArrayStated, way))
} | {
    "torch's": lambda: combine(
        Noisy, pytest.importorskip("torch").utils.data.IterableDataset
    )(),
}
KINDS = EXACT | OTHERS


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


def validate(trainer, loader, limit_train_batches=None, **options):
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
    ("a generator", "two fits"),
    ("itertools", "after a list"),
    ("StatedAndRestartsAtItsEnd", "one fit"),
    ("StatedAndRestartsInIter", "two fits"),
    ("StatedAndReseeded", "one fit, limited"),
    ("StatedAndRestartsAtItsEnd", "validations"),
]


@pytest.mark.parametrize("kind, way", [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
    for case in itertools.product(EXACT, WAYS)
    if "Stated" in case[0] or "validations" not in case[1]
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


@pytest.mark.parametrize("kind", OTHERS)
def test_an_iterator_without_a_state_resumes_in_its_first_pass(tmp_path, caplog, kind):
    def fit(trainer, ckpt_path=None):
        if ckpt_path is None:
            trainer.fit(DATA[:4], max_epochs=1)
        trainer.fit(KINDS[kind](), max_epochs=3, ckpt_path=ckpt_path)

    check_twins(tmp_path, make, fit, {6, 9})
    told = [text for text in caplog.messages if "a checkpoint does not know" in text]
    assert len(told) == 1 and type(KINDS[kind]()).__name__ in told[0]


@pytest.mark.parametrize("kind", OTHERS)
def test_an_iterator_without_a_state_is_refused_after_its_first_pass(tmp_path, kind):
    saves = Saves(tmp_path, {6, 8})
    make([saves]).fit(KINDS[kind](), max_epochs=2)
    assert len(saves.paths) == 2
    for path, step in saves.paths.items():
        for loader in (KINDS[kind](), combine(Stated, RestartsInIter)()):
            with pytest.raises(ValueError, match="can't be resumed after its first"):
                make([]).fit(loader, max_epochs=3, ckpt_path=path)
        # The remedies of the message.
        make([]).fit(DATA[:5], max_epochs=3, ckpt_path=path)
        make([rest := Recorder()]).fit(iter(DATA), max_steps=9, ckpt_path=path)
        assert len(rest.losses) == 9 - step


@pytest.mark.parametrize("kind", [*OTHERS, "itertools"])
def test_where_a_validations_iterator_is_is_said_to_be_lost(tmp_path, caplog, kind):
    def fit(**options):
        trainer = make([])
        validate(trainer, KINDS[kind](), 3, **options)
        return "`val_loader` starts again: it has no JSON" in caplog.text

    saves = Saves(tmp_path, {2})
    validate(make([saves]), KINDS[kind](), 3)
    assert not fit()
    assert fit(ckpt_path=next(iter(saves.paths)))


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


class Later(RestartsAtItsEnd, Stated):
    """Restores a state when it is next iterated."""

    size, state = 40, None

    def __iter__(self):
        if self.state is not None:
            super().load_state_dict(self.state)
            self.state = None
        return self

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("kind", [Long, Later])
def test_a_state_may_be_reset_or_restored_by_iter(tmp_path, kind):
    def fit(trainer, **options):
        trainer.fit(kind(), max_epochs=2, **options)

    check_twins(tmp_path, make, fit, {20, 35})


def test_a_checkpoint_counts_the_batches_of_the_present_loader(tmp_path):
    trainer, path = make([recorder := Recorder()]), tmp_path / "saved"
    trainer.fit(DATA[:5], max_epochs=1)
    for _ in trainer.steps(iter(DATA[:4])):
        pass
    for number, _ in enumerate(trainer.steps(iter(DATA))):
        if number == 3:
            trainer.save(path)
    again = make([rest := Recorder()])
    again.fit(iter(DATA), max_epochs=3, ckpt_path=path)
    assert rest.losses == recorder.losses[-16:]


def test_a_state_of_zero_is_a_state(caplog):
    kind = combine(RestartsAtItsEnd)
    kind.state_dict = lambda self: self.at
    kind.load_state_dict = lambda self, at: setattr(self, "at", at)
    make([]).fit(kind(), max_epochs=1)
    assert "a checkpoint does not know" not in caplog.text
