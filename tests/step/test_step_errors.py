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
    linear_on_one_device,
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
WRONG = ValueError, TypeError
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def changed(after):
    return quiet(Mlp(KEY), after_update=after)


def with_weight(change):
    return changed(
        lambda m: eqx.tree_at(lambda m: m.first.weight, m, change(m.first.weight))
    )


def optimized(optimizer):
    return make_small(optimizer=optimizer).fit(batches(16))


def sam():
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1), ascent, sync_period=3)


def changing(state_of):
    """An optimizer whose state has another form after a step."""
    return optax.GradientTransformation(
        lambda params: {"a": jnp.zeros(()), "b": jnp.zeros(())},
        lambda updates, state, params=None: (updates, state_of(state)),
    )


def with_state(loss_fn=None, **options):
    model, state = eqx.nn.make_with_state(NormNet)(KEY)
    quiet(model, state=state, loss_fn=loss_fn, **options).fit(batches(16))


def returning(change):
    def loss_fn(model, x, y, state):
        over_rows = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        logits, state = over_rows(x, state)
        return change(cross_entropy(logits, y).mean(), state)

    with_state(loss_fn)


def criterion(loss):
    trainer = make_small(eqx.nn.Linear(4, 4, key=KEY), loss=loss)
    trainer.fit([(X4[:4], np.arange(4))])


def one(params="critic", loss_fn=critic_loss, optimizer=CRITIC, **options):
    return Part(params, loss_fn, optimizer, **options)


def gan(*of_parts, **options):
    return quiet(Gan(), list(of_parts), **options)


def over_a_pass(*names, rows=16):
    """A validation with a metric over a pass, of a part that returns these."""

    def loss_fn(gan, x, keys):
        loss, metrics = critic_loss(gan, x, keys)
        return loss, metrics | dict.fromkeys(names, x[:rows])

    metrics = {"most": PassMetric(lambda scores, x: x.min())}
    gan(one(loss_fn=loss_fn), parts()[1], metrics=metrics).validate(DATA)


def twice(gan, x, keys):
    loss, _ = critic_loss(gan, x, keys)
    return loss, {"b_loss": loss}


def predict(of):
    both = of(Gan().generator, Gan().critic)
    return quiet(both, loss_fn=lambda model, x: x).predict(DATA)


def example(loss, rows=8, **options):
    options = {"strategy": Sharded(), "loss_fn": per_example(loss)} | options
    make_small(**options).fit(batches(rows))


def plain(model, x, y):
    return cross_entropy(model(x), y)


def of_example(function):
    return lambda: per_example(function)


def mean(prediction, target):
    return prediction.mean()


def weighted(weight, **options):
    options = options or {"loss": "cross_entropy"}
    make_small(**options).fit([(*batches(8)[0], weight)])


def focal(model, x, y):
    loss = cross_entropy(jax.vmap(model)(x), y)
    return loss, jnp.exp(-loss)


def of_model(**options):
    """A loss whose second value is of the parameters, and so no weight."""
    make_small(**{"loss_fn": focal} | options).fit(batches(8, 8))


NOTHING = jax.tree.map(lambda _: False, Gan())
LAST = r"\(loss, metrics, state\), with .*; got "
IN_VMAP = r"\(4, 4\) for a batch .* in jax.vmap"
NO_WEIGHT = "depends on the model's par.*into a dict"
REFUSED = {
    "after_update": [
        (lambda: changed(3), TypeError, "`after_update` must be a function model -> m"),
        (lambda: changed(lambda model, x: model), TypeError,
         "is called with the model and what it nam"),
        (lambda: changed(lambda: None), TypeError, "is called with the model"),
        (lambda: changed(lambda model: None), TypeError,
         "returned a NoneType; it must be the model"),
        (lambda: changed(lambda model: model.first), TypeError,
         "returned a Linear; it must be the mod"),
        (lambda: with_weight(lambda w: w.T), TypeError,
         r"first.weight was .*, is \(4, 16\)"),
        (lambda: with_weight(lambda w: 0.5), TypeError, "nothing but values of arrays"),
        (lambda: changed(eqx.nn.inference_mode), TypeError,
         "eqx.tree_at: .*inference is another one"),
    ],
    "optimizers": [
        (lambda: optimized(optax.chain(optax.clip(1.0), sam())), ValueError,
         "pass opaque_mode=True"),
        (lambda: optimized(optax.lookahead(optax.sgd(0.1), 5, 0.5)), ValueError,
         "optax.lookahead trains pairs"),
        (lambda: optimized(changing(lambda s: {"a": s["a"]})), TypeError,
         "after a step: b is missing"),
        (lambda: optimized(changing(lambda s: s | {"a": jnp.zeros(2)})), TypeError,
         r"another shape after a step: a was \(\), is \(2,\)"),
    ],
    "models": [
        (lambda: make_small().inference_model(member=0), ValueError,
         "`member` needs a Trainer with `ensemble`"),
        (lambda: quiet({"a": ONES}, loss_fn=lambda *_: 0.0).inference_model(),
         TypeError, "`inference_model` calls the model on one"),
        (lambda: gan(*parts()).predict(DATA), TypeError,
         r"Gan has no __call__.*jax\.vmap\(trainer"),
        (lambda: predict(lambda *two: {"generator": two[0], "critic": two[1]}),
         TypeError, r"trainer\.model\['generator'\]"),
        (lambda: make_small(remat=True), ValueError,
         "`remat`=True recomputes each block of every jaxdp.Stack.*has none"),
        *((lambda name=name: make_small(precision=name), ValueError,
           "`precision` must be one of '32-true', '32-highest', 'bf16-m")
          for name in ("b16", None, 64)),
    ],
    "losses": [
        (lambda: returning(lambda loss, state: (loss, (state, {}))), TypeError,
         LAST + r"an array of .*, a tuple of 2 \(State, dict\)"),
        (lambda: returning(lambda loss, state: (loss, state, {})), TypeError,
         LAST + "an array of .*, a State, a dict"),
        (lambda: returning(lambda loss, state: loss), TypeError,
         LAST + "an array of shape ()"),
        (lambda: criterion(lambda p, y: -jax.nn.log_softmax(p)[y]), ValueError,
         IN_VMAP),
        (lambda: criterion(lambda p, y: 1 - jax.nn.softmax(p)[y]), ValueError, IN_VMAP),
        (lambda: criterion(lambda p, y: -jnp.take(p, y, axis=0)), ValueError, IN_VMAP),
        (lambda: make_small(eqx.nn.Linear(4, 3, key=KEY), loss="mse").fit(
            [(X4 * 1j, X4[:, :3])]), WRONG, "got complex64"),
    ],
    "parts": [
        (lambda: gan(one("citric")), WRONG,
         r"'citric' matches no submodule.*critic.layers"),
        (lambda: gan(one(), one("**.weight", name="x")), WRONG,
         "in 'critic' and in 'x'"),
        (lambda: gan(one(), one(name="critic")), WRONG, "two are named 'critic'"),
        (lambda: gan(one(["critic"])), WRONG, "pass `name`"),
        (lambda: gan(one("*")), WRONG, r"'\*' can't be put before"),
        (lambda: gan(one(name="val")), WRONG, "'val_' and 'test_'"),
        (lambda: gan(one(NOTHING, name="none")), WRONG, "no floating"),
        (lambda: gan(one({"critic": True}, name="x")), WRONG, "a prefix of the model"),
        (lambda: gan(one(lambda gan: gan)), WRONG, "or a pytree of bools"),
        (lambda: gan(Part("critic", CRITIC, critic_loss)), WRONG,
         "`optimizer` must be an optax"),
        (lambda: quiet(Gan(), {"critic": CRITIC}), WRONG,
         "`optimizer` must be .* or a list of jaxdp.Part"),
        (lambda: quiet(Gan(), one()), WRONG, "or a list of jaxdp.Part; got"),
        (lambda: gan(one(every=0)), WRONG, "`every`"),
        (lambda: gan(one(gradient_clip_val=-1)), WRONG, "`gradient_clip_val`"),
        (lambda: gan(one(optimizer=optax.adam)), WRONG, "`optimizer` must be an optax"),
        (lambda: gan(one(loss_fn="mse")), WRONG, "`loss_fn` must be a callable"),
        (lambda: gan(CRITIC, GENERATOR), WRONG,
         "every element must be a jaxdp.Part"),
        (lambda: gan(), WRONG, "empty list"),
        (lambda: gan(one(), loss="mse", metrics=["accuracy"]), WRONG,
         "`loss` can't"),
        (lambda: gan(one(), loss_fn=critic_loss), WRONG,
         "`loss_fn` can't be combined with"),
        (lambda: gan(one(), filter_spec=eqx.is_array), WRONG,
         "`filter_spec` can't be combined with"),
        (lambda: gan(one(), gradient_clip_val=1.0), WRONG,
         "`gradient_clip_val` can't be combined"),
        (lambda: gan(one(), strategy=Bitwise(Sharded())), WRONG,
         "does not work with a list of parts"),
        (lambda: gan(one(), strategy=LocalSGD(every=2)), WRONG,
         "LocalSGD keeps its replicas in"),
        (over_a_pass, ValueError, "no part has a `loss_fn` that returns"),
        (lambda: over_a_pass("predictions", "targets", rows=3), ValueError,
         r"the predictions have .* for a batch of 16 rows; it must have the rows"),
        (lambda: over_a_pass("predictions"), ValueError,
         r"does not return \['targets'\]"),
        (lambda: gan(parts()[0], one("generator", lambda gan, x: x[:, 0])).fit(DATA),
         ValueError, "does not depend on any.*in the Part 'generator'"),
        (lambda: gan(one("critic", twice, name="a"), one("generator", name="a_b")).fit(
            DATA), ValueError, "two values named 'a_b_loss'"),
        (lambda: finders.lr_find(gan(*parts()), DATA, optimizer=optax.adam),
         ValueError, "a list of parts"),
    ],
    "per_example": [
        *((of_example(function), TypeError, "per_example|takes nothing")
          for function in (None, 3, "mse", ONES, lambda: 0)),
        (lambda: example(lambda model, x, y, keys: 0.0), WRONG,
         "per_example.*`keys`|`keys`.*per_example"),
        (lambda: example(lambda model, x, y, *, mask: 0.0), WRONG,
         "per_example.*`mask`|`mask`.*per_example"),
        (lambda: example(lambda model, state, x, y: 0.0), WRONG,
         "per_example.*`state`|`state`.*per_example"),
        *((lambda rows=rows: example(lambda model, x, y: model(x), rows), ValueError,
           "`loss_fn`: the loss") for rows in (3, 4, 8)),
        (lambda: example(lambda model, x, y: (x[0], {"logits": model(x)}), 3),
         ValueError, "`loss_fn`: metric 'logits'"),
        (lambda: example(lambda model, x, y: (plain(model, x, y), x), 4), ValueError,
         "`loss_fn`: the loss"),
        (lambda: example(lambda model, x, y: (x[0], {"pair": (x[0], x)}), 4),
         ValueError, "`loss_fn`: metric 'pair'"),
        (lambda: with_state(per_example(plain)), WRONG,
         "per_example.*state|state.*per_example"),
        (lambda: make_small(loss=per_example(jnp.add)), TypeError,
         "pass it as `loss_fn`"),
        (lambda: make_small(metrics={"a": per_example(jnp.add)}), TypeError,
         "pass it as `loss_fn`"),
        (lambda: example(None, loss_fn=lambda model, x, y: jax.vmap(model)(x).sum(1),
                         strategy=Bitwise(Sharded())), WRONG, "per_example"),
    ],
    "weights": [
        (lambda: weighted({"a": ONES}), TypeError, "must be an array .rows,."),
        (lambda: weighted(np.ones((8, 2))), ValueError, r"shape \(8, 2\)"),
        (lambda: weighted(ONES, loss=mean), ValueError, r"values of shape \(\) and"),
        (lambda: weighted(ONES, metrics={"m": mean}), ValueError,
         "return no mean, which can't be"),
        (lambda: weighted(-ONES), ValueError, "0 or more.* has -1.0. For fac"),
        (lambda: weighted(1 - np.arange(8), loss=lambda p, y: p.mean(1)), ValueError,
         "has -"),
        (lambda: weighted(ONES, loss_fn=lambda m, x, *b: (x[0], 1.0)), ValueError,
         "into a dict"),
        (lambda: weighted(ONES, loss_fn=lambda m, x, *b: (b[0], b[1])), TypeError,
         "dtype int32"),
        (of_model, ValueError, NO_WEIGHT),
        (lambda: of_model(strategy=Sharded(), accumulate_grad_batches=2), ValueError,
         NO_WEIGHT),
        (lambda: of_model(strategy=FSDP(min_size=1), precision="bf16-mixed"),
         ValueError, NO_WEIGHT),
        (lambda: of_model(strategy=Pmap(), steps_per_execution=2), ValueError,
         NO_WEIGHT),
        (lambda: of_model(loss_fn=None, loss=lambda p, y: (
            cross_entropy(p, y), jax.nn.softmax(p)[:, 0])), ValueError, NO_WEIGHT),
        (lambda: linear_on_one_device(
            loss=None, optimizer=[Part("weight", focal, optax.sgd(0.1))]
        ).fit(batches(8, 8)), ValueError, NO_WEIGHT),
    ],
}  # fmt: skip


@each_refused(REFUSED)
def test_what_can_not_be_is_refused(provoke, error, words):
    with pytest.raises(error) as caught:
        provoke()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(words, text, re.DOTALL), text
