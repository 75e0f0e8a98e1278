"""`Arrays`: batches of arrays in memory, which a trainer shuffles and resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import Recorder, mlp_trainer, rows
from twins import check_twins

from jaxdp import Arrays, Sharded, Whole

X, Y = rows(53)
"""In batches of 16: three, and one of five rows."""


def losses(loader, **options):
    recorder = Recorder()
    trainer = mlp_trainer(recorder, **options)
    history = trainer.fit(loader, max_epochs=2)
    return recorder.losses, history


def first_columns(loader):
    return [np.asarray(batch[0])[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize(
    "drop_last, sizes", [(False, [16] * 3 + [5]), (True, [16] * 3)]
)
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_by_hand_each_epoch_has_every_row_once_in_an_order_of_its_seed(
    make, drop_last, sizes
):
    def epochs(seed):
        options = {"batch_size": 16, "drop_last": drop_last, "seed": seed}
        loader = Arrays(make(X), make(Y), **options)
        assert len(loader) == len(sizes)
        return [list(loader) for _ in range(2)]

    for epoch in epochs(3):
        assert [len(x) for x, _ in epoch] == sizes
        x, y = map(np.concatenate, zip(*epoch, strict=True))
        places = [int(np.flatnonzero((X == row).all(axis=1))[0]) for row in x]
        assert len({*places}) == len(places)
        np.testing.assert_array_equal(y, Y[places])
    first, second = map(first_columns, epochs(3))
    assert [first, second] == [*map(first_columns, epochs(3))]
    assert first != second and first != first_columns(epochs(4)[0])


@pytest.mark.parametrize(
    "arrays, structure",
    [
        ((X,), "*"),
        ((X, Y), "(*, *)"),
        ((X, Y, X[:, 0]), "(*, *, *)"),
        (([X, Y],), "(*, *)"),
        (({"a": X, "b": jnp.asarray(Y)},), "{'a': *, 'b': *}"),
        (((X, {"z": X}), Y), "((*, {'z': *}), *)"),
    ],
)
def test_a_batch_has_the_form_of_what_was_passed(arrays, structure):
    batch = next(iter(Arrays(*arrays, batch_size=16)))
    assert str(jax.tree.structure(batch)) == f"PyTreeDef({structure})"
    assert all(leaf.shape[0] == 16 for leaf in jax.tree.leaves(batch))


def test_arrays_are_narrowed_as_batches_are_and_a_whole_has_no_rows():
    times = Whole(np.linspace(0, 1, 7))
    (x, whole), y = next(
        iter(Arrays((X.astype(np.float64), times), Y.astype(np.int64)))
    )
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert whole.array.shape == (7,) and whole.array.dtype == np.float32


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_unshuffled_it_trains_as_a_list_of_the_same_batches(options):
    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 53, 16)]
    found, history = losses(Arrays(X, Y, batch_size=16, shuffle=False), **options)
    wanted, expected = losses(batches, **options)
    assert found == wanted and history.state_dict() == expected.state_dict()


def test_the_trainers_seed_shuffles_and_not_the_loaders():
    def run(seed, own):
        return losses(Arrays(X, Y, batch_size=16, seed=own), seed=seed)[0]

    assert run(0, 1) == run(0, 2) != run(1, 1)


def test_validation_and_prediction_take_rows_in_order():
    shuffled = Arrays(X, Y, batch_size=16)
    trainer = mlp_trainer()
    trainer.fit(shuffled, shuffled)
    alone = trainer.predict([(X, Y)])
    np.testing.assert_allclose(trainer.predict(shuffled), alone, rtol=1e-6)
    np.testing.assert_allclose(trainer.predict(Arrays(X)), alone, rtol=1e-6)
    in_order = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 53, 16)]
    assert trainer.validate(shuffled) == trainer.validate(in_order)
    first = trainer.validate(shuffled, limit_batches=1)
    assert first == trainer.validate(in_order[:1])


@pytest.mark.parametrize("steps, which", [(1, range(1, 8)), (3, range(1, 6))])
def test_a_run_goes_on_from_every_step_with_the_same_batches(tmp_path, steps, which):
    check_twins(
        tmp_path,
        lambda callbacks: mlp_trainer(*callbacks, steps_per_execution=steps),
        lambda trainer, **options: trainer.fit(
            Arrays(X, Y, batch_size=16), max_epochs=2, **options
        ),
        which=which,
        every_step=steps == 1,
    )


def test_it_is_trained_on_over_several_devices():
    one, _ = losses(Arrays(X, Y, batch_size=16))
    eight, _ = losses(Arrays(X, Y, batch_size=16), strategy=Sharded())
    np.testing.assert_allclose(eight, one, rtol=1e-5)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Arrays(), TypeError, r"needs arrays with rows: Arrays\(x, y"),
        (lambda: Arrays(Whole(X)), TypeError, "needs arrays with rows"),
        (lambda: Arrays([1, 2]), TypeError, r"arrays\[0\] is a int.*np.asarray"),
        (lambda: Arrays(X, "y"), TypeError, r"arrays\[1\] is a str.*np.asarray"),
        (
            lambda: Arrays(X, Y.astype(str)),
            TypeError,
            r"batch\[1\] is a ndarray of dtype",
        ),
        (lambda: Arrays(X, Y[1:]), ValueError, r"\[0\] \(53, 4\), arrays\[1\] \(52,\)"),
        (lambda: Arrays(X[:0], Y[:0]), ValueError, "no rows in arrays"),
        (lambda: Arrays(X, batch_size=0), ValueError, "`batch_size` must be 1 or more"),
        (lambda: Arrays(X, batch_size=8.0), TypeError, "`batch_size` must be an int"),
        (lambda: Arrays(X, shuffle=None), ValueError, "`shuffle` must be one of True"),
        (lambda: Arrays(X[:9], drop_last=True), ValueError, "9 rows are less than one"),
    ],
)
def test_what_it_cannot_make_batches_of_is_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()
