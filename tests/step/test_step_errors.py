"""Losses, models, parts and weights that a step can't use are errors that say why."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_parts import CRITIC, DATA, GENERATOR, Gan, critic_loss, parts
from toys import (
    Mlp,
    NormNet,
    batches,
    each_refused,
    linear,
    make_small,
    quiet,
)

from jaxdp import (
    FSDP,
    Bitwise,
    LocalSGD,
    Part,
    PassMetric,
    Pmap,
    Sharded,
    finders,
    per_example,
)

KEY = jax.random.key(0)
ONES = np.ones(8, np.float32)
X4 = np.ones((8, 4), np.float32)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def changed(after):
    return lambda: quiet(Mlp(KEY), after_update=after)


def with_weight(change):
    at = lambda m: m.first.weight  # noqa: E731
    return changed(lambda m: eqx.tree_at(at, m, change(at(m))))


class TwoOutputs(eqx.nn.Linear):
    def __call__(self, x):
        return super().__call__(x), x


def optimized(optimizer):
    return lambda: make_small(optimizer=optimizer).fit(batches(16))


ASCENT = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
SAM = optax.contrib.sam(optax.sgd(0.1), ASCENT, sync_period=3)


def changing(state_of):
    """An optimizer whose state has another form after a step."""
    first = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    update = lambda updates, state, params=None: (updates, state_of(state))  # noqa: E731
    return optimized(optax.GradientTransformation(lambda params: first, update))


def with_state(loss_fn=None, **options):
    model, state = eqx.nn.make_with_state(NormNet)(KEY)
    quiet(model, state=state, loss_fn=loss_fn, **options).fit(batches(16))


def returning(change):
    def loss_fn(model, x, y, state):
        over_rows = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        logits, state = over_rows(x, state)
        return change(cross_entropy(logits, y).mean(), state)

    return lambda: with_state(loss_fn)


def criterion(loss):
    return lambda: make_small(linear(4, 4), loss=loss).fit([(X4[:4], np.arange(4))])


def one(params="critic", loss_fn=critic_loss, optimizer=CRITIC, **options):
    return Part(params, loss_fn, optimizer, **options)


def gan(*of_parts, **options):
    return quiet(Gan(), list(of_parts), **options)


def part(*arguments, **options):
    return lambda: gan(one(*arguments, **options))


def beside(*of_parts, **options):
    """A trainer of a part, and of others or other options."""
    return lambda: gan(one(), *of_parts, **options)


def over_a_pass(*names, rows=16):
    """A validation with a metric over a pass, of a part that returns these."""

    def loss_fn(gan, x, keys):
        loss, metrics = critic_loss(gan, x, keys)
        return loss, metrics | dict.fromkeys(names, x[:rows])

    metrics = {"most": PassMetric(lambda scores, x: x.min())}
    both = one(loss_fn=loss_fn), parts()[1]
    return lambda: gan(*both, metrics=metrics).validate(DATA)


def twice(gan, x, keys):
    loss, _ = critic_loss(gan, x, keys)
    return loss, {"b_loss": loss}


def in_a_dict():
    both = {"generator": Gan().generator, "critic": Gan().critic}
    quiet(both, loss_fn=lambda model, x: x).predict(DATA)


def example(loss, rows=8, **options):
    options = {"strategy": Sharded(), "loss_fn": per_example(loss)} | options
    make_small(**options).fit(batches(rows))


def of_rows(loss, rows=4):
    return lambda: example(loss, rows)


def plain(model, x, y):
    return cross_entropy(model(x), y)


def names(name, loss):
    """A loss of one example, which can't have an argument of this name."""
    return lambda: example(loss), f"`per_example`.* can't name .*`{name}`"


def mean(prediction, target):
    return prediction.mean()


def weighted(weight, **options):
    options = options or {"loss": "cross_entropy"}
    return lambda: make_small(**options).fit([(*batches(8)[0], weight)])


def focal(model, x, y):
    loss = cross_entropy(jax.vmap(model)(x), y)
    return loss, jnp.exp(-loss)


def of_model(**options):
    """A loss whose second value is of the parameters, and so no weight."""
    options = {"loss_fn": focal} | options
    return lambda: make_small(**options).fit(batches(8, 8)), ValueError, NO_WEIGHT


NOTHING = jax.tree.map(lambda _: False, Gan())
PARTS = [
    (part("citric"), r"'citric' matches no submodule.*critic.layers"),
    (beside(one("**.weight", name="x")), "in 'critic' and in 'x'"),
    (beside(one(name="critic")), "two are named 'critic'"),
    (part(["critic"]), "pass `name`"),
    (part("*"), r"'\*' can't be put before"),
    (part(name="val"), "'val_' and 'test_'"),
    (part(NOTHING, name="none"), "no floating"),
    (part({"critic": True}, name="x"), "a prefix of the model"),
    (part(lambda gan: gan), "or a pytree of bools"),
    (part(loss_fn=CRITIC, optimizer=critic_loss), "`optimizer` must be an optax"),
    (part(every=0), "`every`"),
    (part(gradient_clip_val=-1), "`gradient_clip_val`"),
    (part(optimizer=optax.adam), "`optimizer` must be an optax"),
    (part(loss_fn="mse"), "`loss_fn` must be a callable"),
    (lambda: quiet(Gan(), {"critic": CRITIC}), "must be .* or a list of jaxdp.Part"),
    (lambda: quiet(Gan(), one()), "or a list of jaxdp.Part; got"),
    (lambda: gan(CRITIC, GENERATOR), "every element must be a jaxdp.Part"),
    (gan, "empty list"),
    (beside(loss="mse", metrics=["accuracy"]), "`loss` can't"),
    (beside(loss_fn=critic_loss), "`loss_fn` can't be combined with"),
    (beside(filter_spec=eqx.is_array), "`filter_spec` can't be combined with"),
    (beside(gradient_clip_val=1.0), "`gradient_clip_val` can't be combined"),
    (beside(strategy=Bitwise(Sharded())), "does not work with a list of parts"),
    (beside(strategy=LocalSGD(every=2)), "LocalSGD keeps its replicas in"),
    (over_a_pass(), "no part has a `loss_fn` that returns"),
    (over_a_pass("predictions", "targets", rows=3),
     r"the predictions have .* for a batch of 16 rows; it must have the rows"),
    (over_a_pass("predictions"), r"does not return \['targets'\]"),
    (lambda: gan(parts()[0], one("generator", lambda gan, x: x[:, 0])).fit(DATA),
     "does not depend on any.*in the Part 'generator'"),
    (lambda: gan(one("critic", twice, name="a"), one("generator", name="a_b")).fit(
        DATA), "two values named 'a_b_loss'"),
    (lambda: finders.lr_find(gan(*parts()), DATA, optimizer=optax.adam),
     "a list of parts"),
]  # fmt: skip
OF_EXAMPLES = [
    *((lambda function=function: per_example(function), "per_example|takes nothing")
      for function in (None, "mse", ONES, lambda: 0)),
    names("keys", lambda model, x, y, keys: 0.0),
    names("mask", lambda model, x, y, *, mask: 0.0),
    names("state", lambda model, state, x, y: 0.0),
    *((of_rows(lambda model, x, y: model(x), rows), "`loss_fn`: the loss")
      for rows in (3, 4, 8)),
    (of_rows(lambda model, x, y: (x[0], {"logits": model(x)}), 3),
     "`loss_fn`: metric 'logits'"),
    (of_rows(lambda model, x, y: (plain(model, x, y), x)), "`loss_fn`: the loss"),
    (of_rows(lambda model, x, y: (x[0], {"pair": (x[0], x)})),
     "`loss_fn`: metric 'pair'"),
    (lambda: with_state(per_example(plain)), "per_example.*state|state.*per_example"),
    (lambda: make_small(loss=per_example(jnp.add)), "pass it as `loss_fn`"),
    (lambda: make_small(metrics={"a": per_example(jnp.add)}), "pass it as `loss_fn`"),
    (lambda: example(None, loss_fn=lambda model, x, y: jax.vmap(model)(x).sum(1),
                     strategy=Bitwise(Sharded())), "per_example"),
]  # fmt: skip
LAST = r"\(loss, metrics, state\), with .*; got "
IN_VMAP = r"\(4, 4\) for a batch .* in jax.vmap"
NO_WEIGHT = "depends on the model's par.*into a dict"
REFUSED = {
    "after_update": [
        (changed(3), TypeError, "`after_update` must be a function model -> m"),
        (changed(lambda model, x: model), TypeError,
         "is called with the model and what it nam"),
        (changed(lambda: None), TypeError, "is called with the model"),
        (changed(lambda model: None), TypeError,
         "returned a NoneType; it must be the model"),
        (changed(lambda model: model.first), TypeError,
         "returned a Linear; it must be the mod"),
        (with_weight(lambda w: w.T), TypeError, r"first.weight was .*, is \(4, 16\)"),
        (with_weight(lambda w: 0.5), TypeError, "nothing but values of arrays"),
        (changed(eqx.nn.inference_mode), TypeError,
         "eqx.tree_at: .*inference is another one"),
    ],
    "optimizers": [
        (optimized(optax.chain(optax.clip(1.0), SAM)), ValueError,
         "pass opaque_mode=True"),
        (optimized(optax.lookahead(optax.sgd(0.1), 5, 0.5)), ValueError,
         "optax.lookahead trains pairs"),
        (changing(lambda s: {"a": s["a"]}), TypeError, "after a step: b is missing"),
        (changing(lambda s: s | {"a": jnp.zeros(2)}), TypeError,
         r"another shape after a step: a was \(\), is \(2,\)"),
    ],
    "models": [
        (lambda: make_small().inference_model(member=0), ValueError,
         "`member` needs a Trainer with `ensemble`"),
        (lambda: quiet({"a": ONES}, loss_fn=lambda *_: 0.0).inference_model(),
         TypeError, "`inference_model` calls the model on one"),
        (lambda: gan(*parts()).predict(DATA), TypeError,
         r"Gan has no __call__.*jax\.vmap\(trainer"),
        (in_a_dict, TypeError, r"trainer\.model\['generator'\]"),
        (lambda: make_small(remat=True), ValueError,
         "`remat`=True recomputes each block of every jaxdp.Stack.*has none"),
        (lambda: make_small().inference_model()(X4), TypeError,
         r"for several: jax\.vmap\(infer\)\(xs\)"),
        *((lambda name=name: make_small(precision=name), ValueError,
           "`precision` must be one of '32-true', '32-highest', 'bf16-m")
          for name in ("b16", None, 64)),
    ],
    "losses": [
        (returning(lambda loss, state: (loss, (state, {}))), TypeError,
         LAST + r"an array of .*, a tuple of 2 \(State, dict\).*The State is resul"),
        (returning(lambda loss, state: (loss, state, {})), TypeError,
         LAST + "an array of .*, a State, a dict"),
        (returning(lambda loss, state: loss), TypeError, LAST + "an array of shape ()"),
        (criterion(lambda p, y: -jax.nn.log_softmax(p)[y]), ValueError, IN_VMAP),
        (criterion(lambda p, y: -jnp.take(p, y, axis=0)), ValueError, IN_VMAP),
        *((lambda loss=loss: make_small(loss_fn=loss).fit(batches(8)), TypeError,
           r"shapes \(\(8, 4\), \(8,\)\).*as jaxdp.per_example\(loss_fn\)")
          for loss in (plain, lambda x, model, y: plain(model, x, y))),
        *((lambda options=options: make_small(TwoOutputs(4, 3, key=KEY), **options).fit(
            batches(8)), TypeError, r"got a tuple of 2 \(.*or pass a callable \(pred")
          for options in ({"loss": "mse"}, {"loss": optax.l2_loss},
                          {"loss": lambda p, y: p[0].sum(1), "metrics": ["accuracy"]})),
        (lambda: make_small(linear(), loss=lambda p, y: (p - y).sum(axis=1)).fit(
            [(X4 * 1j, X4[:, :3])]), TypeError, "`loss` has dtype complex64 and can't"),
    ],
    "parts": [(provoke, (ValueError, TypeError), words) for provoke, words in PARTS],
    "per_example": [(provoke, (ValueError, TypeError), words)
                    for provoke, words in OF_EXAMPLES],
    "weights": [
        (weighted({"a": ONES}), TypeError, "must be an array .rows,."),
        (weighted(np.ones((8, 2))), ValueError, r"shape \(8, 2\)"),
        (weighted(ONES, loss=mean), ValueError, r"values of shape \(\) and"),
        (weighted(ONES, metrics={"m": mean}), ValueError,
         "return no mean, which can't be"),
        (weighted(-ONES), ValueError, "0 or more.* has -1.0. For fac"),
        (weighted(1 - np.arange(8), loss=lambda p, y: p.mean(1)), ValueError, "has -"),
        (weighted(ONES, loss_fn=lambda m, x, *b: (x[0], 1.0)), ValueError,
         "into a dict"),
        (weighted(ONES, loss_fn=lambda m, x, *b: (b[0], b[1])), TypeError,
         "dtype int32"),
        of_model(),
        of_model(strategy=Sharded(), accumulate_grad_batches=2),
        of_model(strategy=FSDP(min_size=1), precision="bf16-mixed"),
        of_model(strategy=Pmap(), steps_per_execution=2),
        of_model(loss_fn=None, loss=lambda p, y: (
            cross_entropy(p, y), jax.nn.softmax(p)[:, 0])),
        of_model(loss_fn=None, optimizer=[
            Part("layers[0]", focal, optax.sgd(0.1), name="first")]),
    ],
}  # fmt: skip


@each_refused(REFUSED)
def test_what_can_not_be_is_refused(provoke, error, words):
    with pytest.raises(error) as caught:
        provoke()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(words, text, re.DOTALL), text
