"""Typed PRNG keys as leaves of batches."""

import jax
import numpy as np
import optax
import pytest
from toys import Mlp, On, Recorder, batches, on_one_device
from twins import check_twins

from jaxdp import FSDP, Arrays, LocalSGD, Pmap, Sharded, SingleDevice, Whole

SIZES = 16, 11, 16, 5


def keyed(impl=None, typed=True):
    """Ragged batches with a key for each row, and one for all."""
    found = []
    for number, (x, y) in enumerate(batches(*SIZES)):
        key = jax.random.key(number, impl=impl)
        of_rows = jax.random.split(key, len(x))
        if not typed:
            key, of_rows = map(jax.random.key_data, (key, of_rows))
        found.append((x, y, of_rows, Whole({"of all": key})))
    return found


def losses_of(model, x, y, keys, key):
    logits = jax.vmap(lambda x, key: model(x, key=key))(x, keys)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses * jax.random.uniform(key, ())


def loss_fn(model, x, y, of_rows, of_all):
    return losses_of(model, x, y, of_rows, of_all["of all"])


def from_data(impl):
    def loss_fn(model, x, y, of_rows, of_all):
        wrap = lambda data: jax.random.wrap_key_data(data, impl=impl)  # noqa: E731
        return losses_of(model, x, y, wrap(of_rows), wrap(of_all["of all"]))

    return loss_fn


def make(*callbacks, loss_fn=loss_fn, **options):
    options = {"loss": None, "loss_fn": loss_fn} | options
    return on_one_device(*callbacks, **options)


def fit(data, loss_fn=loss_fn, **options):
    trainer = make(recorder := Recorder(), loss_fn=loss_fn, **options)
    history = trainer.fit(data, data[:2], max_epochs=2)
    return recorder.losses, history["val_loss"]


LAYOUTS = {
    "one": lambda: {"strategy": SingleDevice()},
    "jit": lambda: {"strategy": Sharded(), "steps_per_execution": 2},
    "pmap": lambda: {"strategy": Pmap(), "accumulate_grad_batches": 2},
    "fsdp": lambda: {"strategy": FSDP(min_size=1)},
    "local": lambda: {"strategy": LocalSGD(every=2)},
    "half": lambda: {"strategy": Sharded(), "precision": "bf16-mixed"},
}


@pytest.mark.slow_but("jit", "pmap")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_train_as_their_data(layout):
    impl = "rbg" if layout == "jit" else None
    found = fit(keyed(impl), **LAYOUTS[layout]())
    data, loss_fn = keyed(impl, typed=False), from_data(impl)
    assert found == fit(data, loss_fn, **LAYOUTS[layout]())


def test_callbacks_get_keys_and_a_run_with_keys_resumes(tmp_path):
    class Loader:
        def __iter__(self):
            return iter(keyed())

    seen = []
    sees = On(on_train_batch_start=lambda trainer, batch, _: seen.append(batch))
    make(sees).fit(Loader())
    *_, of_rows, of_all = seen[1]
    *_, given_rows, given_all = keyed()[1]
    assert (of_rows == given_rows).all()
    assert of_all.array["of all"] == given_all.array["of all"]
    fit = lambda trainer, **more: trainer.fit(Loader(), **more)  # noqa: E731
    check_twins(tmp_path, lambda callbacks: make(*callbacks), fit, {3})


def test_a_model_may_use_a_key_of_its_row():
    class Noisy(Mlp):
        def __call__(self, x_and_key):
            return super().__call__(x_and_key[0], key=x_and_key[1])

    data = [((x, keys), y) for x, y, keys, _ in keyed()]
    trainer = on_one_device(model=Noisy(jax.random.key(0)))
    trainer.fit(data, data, max_epochs=1)
    np.testing.assert_array_equal(
        trainer.predict(data)[16:27], trainer.predict(data[1:2])
    )


def test_arrays_may_contain_keys():
    x, y, keys, _ = keyed()[0]
    loader = Arrays(x, y, keys, batch_size=5, shuffle=False)
    for number, (*_, own) in enumerate(loader):
        assert (own == keys[5 * number :][:5]).all()
    data = [(x[i : i + 5], y[i : i + 5], keys[i : i + 5]) for i in (0, 5, 10, 15)]

    def of_rows(model, x, y, drawn):
        return losses_of(model, x, y, drawn, jax.random.key(0))

    trainer = make(loss_fn=of_rows)
    assert trainer.validate(loader) == trainer.validate(data)
    with pytest.raises(ValueError, match="is a single PRNG key"):
        Arrays(x, jax.random.key(0))


@pytest.mark.parametrize("options", [{}, {"loss": "mse"}, {"loss": "cross_entropy"}])
def test_keys_are_refused_as_weights(options):
    x, y, keys, _ = keyed()[0]
    trainer = on_one_device(**{"loss": None, **options})
    with pytest.raises(
        TypeError, match=r"weight must be an array.*`loss_fn\(model, \*batch\)`"
    ):
        trainer.fit([(x, y, keys)])
