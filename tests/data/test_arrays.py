"""`Arrays`: batches of arrays in memory, which a trainer shuffles and resumes."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Mlp, Recorder, bits, mlp_trainer, quiet, rows

from jaxdp import (
    FSDP,
    Arrays,
    Bitwise,
    Callback,
    LocalSGD,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    Whole,
    ZeRO,
)
from jaxdp.callbacks import DonateBuffers
from jaxdp.data.arrays import ArraysSource

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


def test_it_is_trained_on_over_several_devices():
    one, _ = losses(Arrays(X, Y, batch_size=16))
    eight, _ = losses(Arrays(X, Y, batch_size=16), strategy=Sharded())
    np.testing.assert_allclose(eight, one, rtol=1e-5)


# On the devices.

STRATEGIES = {
    "SingleDevice": SingleDevice,
    "Sharded": Sharded,
    "Pmap": Pmap,
    "ZeRO": ZeRO,
    "FSDP": FSDP,
    "LocalSGD": lambda: LocalSGD(every=3),
    "Bitwise": lambda: Bitwise(Sharded()),
    "TensorParallel": lambda: TensorParallel(
        {"data": 4, "model": 2},
        [("first.weight", jax.sharding.PartitionSpec("model", None))],
    ),
}


def all_numbers(on_device, strategy=SingleDevice, **options):
    """What training, validation and prediction over ragged batches give."""

    def arrays(*leaves):
        return Arrays(*leaves, batch_size=16, on_device=on_device)

    recorder = Recorder()
    callbacks = [recorder, *options.pop("callbacks", ())]
    trainer = quiet(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        metrics=["accuracy"],
        strategy=strategy(),
        callbacks=callbacks,
        **options,
    )
    history = trainer.fit(arrays(X, Y), arrays(X[:21], Y[:21]), max_epochs=2)
    predicted = trainer.predict(arrays(X, Y)).tobytes()
    mixed = trainer.validate([(X, Y)])  # from the host, by the same trainer
    return recorder.losses, bits(trainer.state), str(history), predicted, mixed


@pytest.mark.slow_but("SingleDevice-several", "Sharded-accumulated", "FSDP-single")
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"steps_per_execution": 3}],
    ids=["single", "accumulated", "several"],
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_rows_taken_on_the_devices_give_the_bits_of_the_host(name, options):
    strategy = STRATEGIES[name]
    found, wanted = [all_numbers(on, strategy, **options) for on in (True, False)]
    assert found == wanted


@pytest.mark.slow_cases("no jit")
@pytest.mark.parametrize("way", ["no jit", "donated"])
def test_so_they_do_where_the_device_keeps_nothing(way):
    options = {"callbacks": [DonateBuffers("all")]} if way == "donated" else {}
    with jax.disable_jit() if way == "no jit" else contextlib.nullcontext():
        found, wanted = [all_numbers(on, **options) for on in (True, False)]
    assert found == wanted


@pytest.mark.parametrize("first, then", [(True, False), (False, True)])
def test_a_run_goes_on_from_inside_an_epoch_wherever_the_rows_are(
    tmp_path, first, then
):
    def fit(on_device, **options):
        trainer = mlp_trainer()
        loader = Arrays(X, Y, batch_size=16, on_device=on_device)
        trainer.fit(loader, **options)
        return trainer

    path = fit(first, max_steps=3).save(tmp_path / "saved")
    whole = fit(first, max_epochs=2)
    assert bits(fit(then, max_epochs=2, ckpt_path=path).state) == bits(whole.state)


class TimedLinear(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        x, times = x
        return self.linear(x) * times.sum()


@pytest.mark.parametrize("tree", ["weights", "whole", "dict"])
def test_trees_are_kept_on_the_devices_with_weights_and_wholes(tree):
    times, weight = Whole(np.linspace(0, 1, 5)), np.linspace(0.1, 1, 53)
    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    arrays, model, options = {
        "weights": ((X, Y, weight), linear, {"loss": "cross_entropy"}),
        "whole": (((X, times), Y), TimedLinear(linear), {"loss": "cross_entropy"}),
        "dict": (
            ({"a": X, "b": X[:, :3]},),
            linear,
            {"loss_fn": lambda m, d: ((jax.vmap(m)(d["a"]) - d["b"]) ** 2).mean(1)},
        ),
    }[tree]

    def run(on_device):
        recorder = Recorder()
        trainer = quiet(
            model, optax.sgd(0.1), strategy=Sharded(), callbacks=[recorder], **options
        )
        trainer.fit(Arrays(*arrays, batch_size=16, on_device=on_device), max_epochs=2)
        return recorder.losses

    assert run(True) == run(False)


def test_a_step_is_given_the_numbers_of_rows_and_hooks_see_the_rows(caplog):
    class Shows(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, batch, batch_idx):
            self.seen.append(batch)

    def run(on_device):
        trainer = mlp_trainer(shows := Shows())
        loader = Arrays(X, Y, batch_size=16, on_device=on_device)
        trainer.fit(loader, max_epochs=1)
        return trainer, shows.seen, loader

    trainer, seen, loader = run(True)
    assert bits(seen) == bits(run(False)[1])
    batch = [leaf for leaf in trainer.running_plan().leaves if leaf.group == "batch"]
    named = {leaf.path: leaf.shape for leaf in batch}
    assert named["batch.rows"] == (1, 16) and named["whole.table[0]"] == (53, 4)
    assert "arrays (`jaxdp.Arrays`) that each device keeps" in str(trainer.plan(loader))
    told = "are kept on each device, where the steps take"
    assert caplog.text.count(told) == 1
    for _ in range(3):  # of new arrays of the same size nothing is said again
        assert [*trainer.steps(Arrays(X + 1, Y, batch_size=16, on_device=True))]
    assert caplog.text.count(told) == 1


def test_a_label_that_is_no_class_is_found_on_the_devices_too():
    wrong = np.where(np.arange(53) == 40, 7, Y)
    trainer = mlp_trainer()
    with pytest.raises(ValueError, match="labels must be 0 to 2.*from 0 to 7"):
        trainer.fit(Arrays(X, wrong, batch_size=16, on_device=True))


class Device:
    process_index = 0

    def __init__(self, limit):
        self.limit = limit

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit}


SIZE = X.nbytes + Y.nbytes


@pytest.mark.parametrize(
    "on_device, limits, is_kept",
    [
        ("auto", [None], False),  # as CPUs are
        ("auto", [SIZE * 10], True),
        ("auto", [SIZE * 10, SIZE * 10 - 1], False),
        (True, [None], True),
        (False, [SIZE * 100], False),
    ],
)
def test_arrays_are_kept_where_they_take_a_tenth_at_most(on_device, limits, is_kept):
    loader = Arrays(X, Y, on_device=on_device)
    devices = list(map(Device, limits))
    source = ArraysSource(loader, "train_loader", devices=lambda: devices)
    assert (type(source.peek()) is not tuple) == is_kept
    in_order = Arrays(X, Y, np.zeros(53, np.float32), on_device=True)
    assert in_order.table(devices) is None  # rows of weight 0 are replaced on the host


def test_rows_of_weight_0_on_the_host_are_said_once(capsys):
    x, y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    weight = np.array([1.0] * 7 + [0.0], np.float32)
    loader = Arrays(x, y, weight, batch_size=4, on_device=True)
    devices = jax.devices()
    assert loader.table(devices) is loader.table(devices) is None
    assert capsys.readouterr().err.count("stays on the host") == 1
