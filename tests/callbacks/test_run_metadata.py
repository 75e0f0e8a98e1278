"""The optimizer of a run, as text."""

import optax

from jaxdp.callbacks.run_metadata import describe_optimizer


def test_optimizers_are_described_by_their_stages():
    cosine = optax.cosine_decay_schedule(0.1, 100)
    adam = "scale_by_adam(b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, nesterov=False)"
    for optimizer, text in [
        (optax.adam(1e-3), f"{adam}, scale(step_size=-0.001)"),
        (
            optax.adam(cosine),
            f"{adam}, scale_by_learning_rate(cosine_decay_schedule(alpha=0.0,"
            " decay_steps=100, exponent=1.0, init_value=0.1), m=-1)",
        ),
        (
            optax.sgd(0.1, momentum=0.9),
            "trace(decay=0.9, nesterov=False), scale(step_size=-0.1)",
        ),
        (
            optax.partition({"a": optax.sgd(1.0), "b": optax.set_to_zero()}, None),
            "partition(scale(step_size=-1.0), mask_compatible_extra_args=False)",
        ),
        (
            optax.inject_hyperparams(optax.sgd)(learning_rate=0.25),
            "inject_hyperparams(inner_factory=sgd, other_hps=False), learning_rate=",
        ),
        (
            optax.GradientTransformation(lambda p: (), lambda u, s, p: (u, s)),
            "test_optimizers_are_described_by_their_stages.<locals>.<lambda>",
        ),
    ]:
        assert describe_optimizer(optimizer).startswith(text)
