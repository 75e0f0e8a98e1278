"""Named losses and metrics, for the forms of targets in docs/metrics.md."""

import functools
import itertools
import pathlib
import re
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import mlp, quiet

from jaxdp import Ensemble, losses

DOCS = pathlib.Path(__file__).parents[1] / "docs"
ROWS, K = 12, 7
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(ROWS, K)).astype(np.float32)
SCORES = LOGITS[:, 0] * 3
LABELS = np.argsort(LOGITS, axis=1)[np.arange(ROWS), RNG.integers(0, K, ROWS)]
KINDS = {
    "labels": LABELS,
    "one-hot": np.eye(K)[LABELS],
    "probabilities": RNG.dirichlet(np.ones(K), ROWS),
    "several yes/no": RNG.integers(0, 2, (ROWS, K)),
    "yes/no": RNG.integers(0, 2, ROWS),
}
DTYPES = {"bool": bool, "int": np.int32, "float": np.float32}


def log_softmax(x):
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def top(x, y, among):
    return (np.argsort(-x, axis=1)[:, :among] == y[:, None]).any(axis=1)


def sigmoid_entropy(x, y):
    return np.logaddexp(0, x) - y * x


def huber(x, y):
    return np.where(abs(x - y) < 1, (x - y) ** 2 / 2, abs(x - y) - 0.5)


EXPECTED = {
    ("cross_entropy", "label"): lambda x, y: -(np.eye(K)[y] * log_softmax(x)).sum(1),
    ("cross_entropy", "one-hot"): lambda x, y: -(y * log_softmax(x)).sum(1),
    ("accuracy", "label"): lambda x, y: top(x, y, 1),
    ("accuracy", "one-hot"): lambda x, y: top(x, y.argmax(1), 1),
    ("accuracy", "yes/no"): lambda x, y: (x > 0) == (y > 0.5),
    ("top_5_accuracy", "label"): lambda x, y: top(x, y, 5),
    ("top_5_accuracy", "one-hot"): lambda x, y: top(x, y.argmax(1), 5),
    ("binary_accuracy", "each entry"): lambda x, y: (x > 0) == (y > 0.5),
    ("binary_cross_entropy", "each entry"): sigmoid_entropy,
    ("mse", "each entry"): lambda x, y: (x - y) ** 2,
    ("mae", "each entry"): lambda x, y: abs(x - y),
    ("huber", "each entry"): huber,
}  # fmt: skip


def table():
    """Each cell of the page: a name, a prediction, a target and what is computed."""
    lines = (
        (DOCS / "metrics.md")
        .read_text()
        .split("## By name")[1]
        .split("## ")[0]
        .splitlines()
    )
    head, _, *body = [line for line in lines if line.startswith("|")]
    names = [re.findall(r"`(\w+)`", cell) for cell in head.split("|")[3:-1]]
    for line in body:
        given, targets, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        kind, forms = targets.split(": ")
        dtypes = re.findall(r"bool|int|float", forms)
        for x_shape, dtype, y_shape in itertools.product(
            shapes(given), dtypes, shapes(forms)
        ):
            x = LOGITS if len(x_shape) == 2 and x_shape[1] == K else SCORES
            y = KINDS[kind]
            if dtype == "bool" and kind == "labels":
                y = y > 3
            y = y.astype(DTYPES[dtype])
            for several, cell in zip(names, cells, strict=True):
                for name in several:
                    where = f"{name} {x_shape} {kind} {dtype} {y_shape}"
                    x, y = x.reshape(x_shape), y.reshape(y_shape)
                    yield pytest.param(name, x, y, cell, id=where)


def shapes(text):
    sizes = {"n": ROWS, "k": K}
    found = re.findall(r"`\(([^`]*)\)`", text)
    return [
        tuple(sizes.get(s.strip()) or int(s) for s in each.split(",") if s.strip())
        for each in found
    ]


CASES = [*table()]
assert len(CASES) == 8 * (4 + 2 + 3 + 1 + 3 + 12 + 6)


def expected(name, x, y, cell):
    """By NumPy in float64, `(n,)`; None for an error."""
    if cell == "error" or (name, cell) not in EXPECTED:
        return None
    squeezed = [a[:, 0] if a.shape == (ROWS, 1) else a for a in (x, y)]
    x, y = (a.astype(np.float64) if a.dtype == np.float32 else a for a in squeezed)
    y = y.astype(int) if y.dtype == bool else y
    return EXPECTED[name, cell](x, y).reshape(ROWS, -1).mean(axis=1)


def test_every_named_metric_is_on_the_pages_about_them():
    reference = (DOCS / "reference" / "models.md").read_text()
    (members,) = re.findall(r"::: jaxdp\.losses\n.*\n *members: \[(.*)\]", reference)
    named = {"metrics.md": {case.values[0] for case in CASES}}
    named["reference/models.md"] = {*members.split(", ")}
    for page, names in named.items():
        missing = losses.METRICS.keys() - names
        assert not missing, f"add to docs/{page}: {missing}"


@pytest.mark.parametrize("name, x, y, cell", CASES)
def test_values_are_those_of_the_table(name, x, y, cell):
    criterion = losses.METRICS[name]
    if (values := expected(name, x, y, cell)) is None:
        with pytest.raises(
            ValueError, match="[Uu]se |pass |Reshape|\\.\\.\\., classes"
        ):
            criterion(jnp.asarray(x), jnp.asarray(y))
        return
    found = criterion(jnp.asarray(x), jnp.asarray(y))
    assert found.shape == (ROWS,) and found.dtype == np.float32
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)
    if name in losses.LOSSES:
        grads = jax.grad(lambda x: criterion(x, jnp.asarray(y)).sum())(jnp.asarray(x))
        assert np.isfinite(grads).all()


class Offset(eqx.Module):
    """Gives the logits in the data, so that a trainer's values are known."""

    offset: jax.Array

    def __call__(self, x):
        return x + self.offset.sum()


FORMS = [
    "(12, 7) labels int (12,)",
    "(12, 7) labels int (12, 1)",
    "(12, 7) one-hot int (12, 7)",
    "(12, 7) probabilities float (12, 7)",
    "(12, 7) several yes/no float (12, 7)",
    "(12,) yes/no bool (12,)",
    "(12, 1) yes/no int (12,)",
    "(12,) yes/no float (12, 1)",
    "(12, 1) yes/no float (12, 1)",
]


@pytest.mark.parametrize("members, weighted", [(None, True), (2, False)])
@pytest.mark.parametrize("form", FORMS)
def test_a_trainer_gives_the_values_of_the_table(form, members, weighted):
    """Ragged batches with weights, or of an ensemble: the mean over all rows."""
    cases = [case.values for case in CASES if case.id.endswith(f" {form}")]
    _, x, y, _ = cases[0]
    known = {case[0]: expected(*case) for case in cases}
    known = {name: values for name, values in known.items() if values is not None}
    loss = next(name for name in known if name in losses.LOSSES)
    weight = (np.arange(ROWS) % 3).astype(np.float32) if weighted else np.ones(ROWS)
    data = [
        (x[rows], y[rows], *([weight[rows]] if weighted else []))
        for rows in (slice(0, 8), slice(8, ROWS))
    ]
    model = Offset(jnp.zeros((members or 1, 1)))
    trainer = quiet(
        model, loss=loss, metrics=[*known], ensemble=members and Ensemble(2)
    )
    found = trainer.validate(data)
    for name, values in known.items():
        mean = np.average(values, weights=weight)
        np.testing.assert_allclose(found[f"val_{name}"], mean, rtol=1e-5, atol=1e-6)
        if members:
            assert found[f"val_{name}[1]"] == pytest.approx(mean, 1e-5)


@pytest.mark.parametrize("entropy", ["binary_cross_entropy", "optax"])
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_several_yes_no_targets_have_no_accuracy_but_a_binary_one(dtype, entropy):
    y = KINDS["several yes/no"].astype(dtype)
    loss = optax.sigmoid_binary_cross_entropy if entropy == "optax" else entropy
    make = lambda metric: quiet(Offset(jnp.zeros(1)), loss=loss, metrics=[metric])  # noqa: E731
    with pytest.raises(ValueError, match="use 'binary_accuracy'"):
        make("accuracy").validate([(LOGITS, y)])
    if entropy == "optax":
        return  # which wants no bools
    found = make("binary_accuracy").validate([(LOGITS, y)])["val_binary_accuracy"]
    assert found == pytest.approx(((LOGITS > 0) == (y > 0)).mean())


@pytest.mark.parametrize("labels", [[-1, 1, 1, -1], [0, 1, 2, 1]])
def test_yes_no_labels_are_0_and_1(labels):
    trainer = quiet(Offset(jnp.zeros(1)), loss="binary_cross_entropy")
    with pytest.raises(ValueError, match="labels must be 0 to 1"):
        trainer.validate([(SCORES[:4], np.array(labels))])


def test_positions_before_the_classes_are_averaged():
    logits = jnp.asarray(LOGITS.reshape(4, 3, K))
    labels = jnp.asarray(LABELS.reshape(4, 3))
    for name in ("cross_entropy", "accuracy", "top_5_accuracy"):
        flat = losses.METRICS[name](jnp.asarray(LOGITS), jnp.asarray(LABELS))
        for y in (labels, labels[..., None]):
            found = losses.METRICS[name](logits, y)
            np.testing.assert_allclose(found, flat.reshape(4, 3).mean(1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_has_the_bits_of_optax_and_nan_for_no_class(dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(64, 300)) * 9, dtype)
    labels = jnp.asarray(rng.integers(0, 256, 64), jnp.uint8)
    theirs = optax.softmax_cross_entropy_with_integer_labels

    def loss_and_gradient(criterion):
        return jax.value_and_grad(lambda z: criterion(z, labels).sum())(logits)

    for ours, expected in zip(
        loss_and_gradient(losses.cross_entropy), loss_and_gradient(theirs), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)
    outside = losses.cross_entropy(logits[:2], jnp.array([300, -1]))
    assert jnp.isnan(outside).all()


SMOOTH = functools.partial(losses.cross_entropy, label_smoothing=0.1)


@pytest.mark.parametrize("is_one_hot", [False, True])
def test_label_smoothing_is_that_of_torch(is_one_hot):
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).standard_normal((8, 5), np.float32)
    labels = np.arange(8) % 5
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(logits),
        torch.tensor(labels),
        **{"reduction": "none", "label_smoothing": 0.1},
    )
    targets = jnp.eye(5)[labels] if is_one_hot else jnp.array(labels)
    np.testing.assert_allclose(SMOOTH(jnp.array(logits), targets), expected, rtol=1e-5)


def test_a_named_loss_with_an_option_is_still_one_of_single_rows():
    model = mlp()
    x, y = np.ones((11, 4), "f4"), np.arange(11) % 3  # not divisible by 8 devices
    trainer = quiet(model, loss=SMOOTH)
    values = SMOOTH(jax.vmap(model)(x), jnp.array(y))
    trained = trainer.validate([(x, y)])["val_loss"]
    assert trained == pytest.approx(float(values.mean()), rel=1e-5)
    assert losses.is_per_row(SMOOTH)
    with pytest.raises(ValueError, match="labels must be 0 to 2"):
        trainer.fit([(x, y + 1)])


def test_label_smoothing_is_a_probability():
    with pytest.raises(ValueError, match="must be from 0 to 1; got 2"):
        losses.cross_entropy(jnp.ones((2, 3)), jnp.zeros(2, int), label_smoothing=2)


@pytest.mark.parametrize("loss, metric, y", [
    ("mse", "binary_accuracy", 2.0 * KINDS["yes/no"] - 1),
    ("mse", "mae", SCORES),
    ("binary_cross_entropy", "accuracy", KINDS["yes/no"]),
    (optax.hinge_loss, "accuracy", 2 * KINDS["yes/no"] - 1),
    ("mse", "accuracy", KINDS["one-hot"]),
    ("cross_entropy", "accuracy", KINDS["probabilities"]),
    ("cross_entropy", "accuracy", KINDS["several yes/no"] * 1.0),
    ("cross_entropy", "accuracy", KINDS["one-hot"] * 5),  # counts
])  # fmt: skip
def test_targets_that_a_loss_and_a_metric_can_read_are_taken(loss, metric, y):
    x = SCORES if y.ndim == 1 else LOGITS
    trainer = quiet(Offset(jnp.zeros(1)), loss=loss, metrics=[metric])
    found = trainer.validate([(x, y.astype(np.float32 if y.dtype == float else int))])
    assert np.isfinite(found[f"val_{metric}"])


@pytest.mark.parametrize("loss, last", [
    ("mse", jax.nn.sigmoid),
    (lambda p, y: -jnp.log(p[:, 0]), jax.nn.softmax),
    ("cross_entropy", jax.nn.log_softmax),
    ("cross_entropy", jnp.tanh),
    ("cross_entropy", None),
])  # fmt: skip
def test_a_model_may_end_in_what_its_loss_does_not_apply(loss, last):
    layers = [mlp(), eqx.nn.Lambda(last)] if last else [mlp(), eqx.nn.Identity()]
    assert quiet(eqx.nn.Sequential(layers), loss=loss).global_step == 0


class Squashed(eqx.Module):
    """Applies its `fn` inside, and its `final_activation` outside of training."""

    mlp: eqx.nn.MLP
    fn: Callable = eqx.field(static=True, default=jax.nn.sigmoid)
    final_activation: Callable = eqx.field(static=True, default=jax.nn.softmax)

    def __call__(self, x):
        return self.mlp(self.fn(x))


def test_a_model_of_ones_own_is_not_searched_for_activations():
    assert quiet(Squashed(mlp()), loss="cross_entropy").global_step == 0


def test_a_first_argument_called_y_true_gets_the_targets():
    def over(y_true, y_pred):
        return jnp.maximum(y_true - y_pred, 0)

    def over_as_here(y_pred, y_true):
        return over(y_true, y_pred)

    expected = np.maximum(KINDS["yes/no"] - SCORES, 0).mean()
    metrics = {"here": over_as_here, "keras": over, "filled": functools.partial(over)}
    trainer = quiet(Offset(jnp.zeros(1)), loss=over, metrics=metrics)
    found = trainer.validate([(SCORES, KINDS["yes/no"])])
    assert [*found.values()] == pytest.approx([expected] * 4, rel=1e-5)
