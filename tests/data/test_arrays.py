"""`Arrays`: batches of arrays in memory, which a trainer shuffles and resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import On, Recorder, bits, linear, mlp_trainer, on_one_device, rows

from jaxdp import FSDP, Arrays, Bitwise, Pmap, Sharded, SingleDevice, Whole
from jaxdp.callbacks import DonateBuffers

X, Y = rows(53)
"""In batches of 16: three, and one of five rows."""


def there(tree, first=0):
    """Puts a tree on two devices; on a single CPU, NumPy selects the rows."""
    axes = {"axis_types": (jax.sharding.AxisType.Auto,)}
    mesh = jax.make_mesh((2,), "d", **axes, devices=jax.devices()[first : first + 2])
    spec = jax.sharding.PartitionSpec()
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, spec))


def losses(loader, make=mlp_trainer, **options):
    trainer = make(recorder := Recorder(), **options)
    return recorder.losses, trainer.fit(loader, max_epochs=2)


def first_columns(loader):
    return [np.asarray(batch[0])[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("make, drop_last, sizes", [
    (np.asarray, False, [16] * 3 + [5]), (jnp.asarray, True, [16] * 3),
])  # fmt: skip
def test_each_iteration_has_every_row_once_in_the_order_of_its_seed(
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


@pytest.mark.parametrize("arrays, structure", [
    ((X,), "*"),
    ((X, Y, X[:, 0]), "(*, *, *)"),
    (([X, Y],), "(*, *)"),
    (({"a": X, "b": jnp.asarray(Y)},), "{'a': *, 'b': *}"),
    (((X, {"z": X}), Y), "((*, {'z': *}), *)"),
])  # fmt: skip
def test_a_batch_has_the_structure_of_the_arguments(arrays, structure):
    batch = next(iter(Arrays(*arrays, batch_size=16)))
    assert str(jax.tree.structure(batch)) == f"PyTreeDef({structure})"
    assert all(leaf.shape[0] == 16 for leaf in jax.tree.leaves(batch))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_unshuffled_arrays_train_as_a_list_of_batches(options):
    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 53, 16)]
    found, history = losses(Arrays(X, Y, batch_size=16, shuffle=False), **options)
    wanted, expected = losses(batches, **options)
    assert found == wanted and history.state_dict() == expected.state_dict()


def test_the_trainers_seed_decides_the_order():
    def run(seed, own):
        return losses(Arrays(X, Y, batch_size=16, seed=own), seed=seed)[0]

    assert run(0, 1) == run(0, 2) != run(1, 1)


def test_validation_and_prediction_do_not_shuffle():
    shuffled = Arrays(X, Y, batch_size=16)
    trainer = mlp_trainer()
    trainer.fit(shuffled, shuffled)
    alone = trainer.predict([(X, Y)])
    for loader in (shuffled, Arrays(X)):
        np.testing.assert_allclose(trainer.predict(loader), alone, rtol=1e-6)
    in_order = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 53, 16)]
    assert trainer.validate(shuffled) == trainer.validate(in_order)
    first = trainer.validate(shuffled, limit_batches=1)
    assert first == trainer.validate(in_order[:1])


# On a device.


def all_numbers(place, strategy=SingleDevice, **options):
    """Returns the results of training, validation and prediction."""

    def arrays(*leaves):
        return Arrays(*map(place, leaves), batch_size=16)

    recorder, callbacks = Recorder(), options.pop("callbacks", ())
    options |= {"metrics": ["accuracy"], "strategy": strategy()}
    trainer = on_one_device(recorder, *callbacks, **options)
    history = trainer.fit(arrays(X, Y), arrays(X[:21], Y[:21]), max_epochs=2)
    predicted = trainer.predict(arrays(X, Y)).tobytes()
    mixed = trainer.validate([(X, Y)])  # from the host, by the same trainer
    return recorder.losses, bits(trainer.state), str(history), predicted, mixed


@pytest.mark.slow_cases("Pmap-options3", "<lambda>-options4")
@pytest.mark.parametrize("strategy, options", [
    (SingleDevice, {"steps_per_execution": 3}),
    (Sharded, {"accumulate_grad_batches": 2}),
    (FSDP, {"callbacks": [DonateBuffers("all")]}),
    (Pmap, {"steps_per_execution": 3}),
    (lambda: Bitwise(Sharded()), {"accumulate_grad_batches": 2}),
])  # fmt: skip
def test_rows_selected_on_a_device_have_the_bits_of_the_host(strategy, options):
    def place(array):
        return array if array is Y else there(array)  # one array stays on the host

    found = all_numbers(place, strategy, **options)
    assert found == all_numbers(np.asarray, strategy, **options)


def test_batches_are_on_the_devices_of_the_arrays():
    seen, devices = [], {*jax.devices()[2:4]}
    sees = On(on_train_batch_start=lambda trainer, batch, _: seen.append(batch))
    loader = Arrays(*there((X, Y), 2), batch_size=16)
    mlp_trainer(sees).fit(loader, max_epochs=1)
    for leaf in jax.tree.leaves([*loader, *seen]):
        assert isinstance(leaf, jax.Array) and leaf.devices() == devices


@pytest.mark.parametrize("tree", ["weights", "whole", "dict"])
def test_trees_with_weights_and_wholes_may_be_on_a_device(tree):
    times, weight = np.linspace(0, 1, 5, dtype=np.float32), np.arange(53) % 3 / 4

    def loss_of_whole(model, x, y, times):
        return ((jax.vmap(model)(x) * times.sum() - y) ** 2).mean(1)

    def loss_of_dicts(model, batch):
        return loss_of_whole(model, batch["a"], batch["b"], jnp.ones(1))

    arrays, loss_fn = {
        "weights": ((X, Y, weight), None),
        "whole": ((X, X[:, :3], Whole(times)), loss_of_whole),
        "dict": (({"a": X, "b": X[:, :3]},), loss_of_dicts),
    }[tree]

    def run(arrays):
        loader = Arrays(*arrays, batch_size=16)
        options = {"loss": None, "loss_fn": loss_fn} if loss_fn else {}
        options |= {"model": linear(), "strategy": Sharded()}
        return losses(loader, on_one_device, **options)[0]

    assert run(there(arrays)) == run(arrays) == run(jax.device_put(arrays))


def test_on_device_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="`on_device`.*jax.device_put"):
        Arrays(X, Y, on_device=True)


def test_each_epoch_has_an_order_of_its_own():
    def orders():
        seen, data = [], np.arange(64, dtype=np.float32)[:, None]
        sees = On(on_train_batch_start=lambda trainer, batch, _: seen.append(batch))
        loss_fn = lambda model, x: jax.vmap(model)(x).sum(1)  # noqa: E731
        trainer = on_one_device(sees, model=linear(1), loss=None, loss_fn=loss_fn)
        trainer.fit(Arrays(data, batch_size=64), max_epochs=2)
        return [np.ravel(jax.tree.leaves(batch)[0]).tolist() for batch in seen]

    first, second = orders()
    assert first != second and [first, second] == orders()
    assert sorted(second) == [*range(64)]
