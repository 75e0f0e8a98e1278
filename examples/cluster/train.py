"""A training script for clusters: the same on a laptop, and under every launcher here.

    python examples/cluster/train.py --output runs/cluster

Processes that a launcher has started train together, on all their devices. If the job
is started again, it resumes from the newest checkpoint in `--output`, a folder that all
machines must reach; `tail -f <output>/metrics.csv` shows how far it is.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax

import jaxdp
from jaxdp.callbacks import CSVLogger, ModelCheckpoint, StallWatch


def batches(seed: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Points and whether they lie in the unit circle: put your own loader here."""
    points = np.random.default_rng(seed).uniform(-1, 1, (count, 256, 2))
    inside = (points**2).sum(-1) < 1
    return list(zip(points.astype(np.float32), inside.astype(np.int32), strict=True))


def main(argv: list[str] | None = None) -> jaxdp.Trainer:
    """Trains, or resumes; returns the trainer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("runs/cluster"))
    parser.add_argument("--epochs", type=int, default=50)
    args = parser.parse_args(argv)

    jaxdp.distributed.initialize()  # with the processes that a launcher has started
    trainer = jaxdp.Trainer(
        eqx.nn.MLP(2, 2, 64, 2, key=jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        metrics=["accuracy"],
        strategy=jaxdp.FSDP(),
        callbacks=[
            ModelCheckpoint(args.output / "checkpoints", every_n_train_steps=50),
            CSVLogger(args.output),
            StallWatch(600, abort=True),  # a hang ends the job, which starts again
        ],
    )
    trainer.fit(batches(0, 32), batches(1, 4), max_epochs=args.epochs, ckpt_path="auto")
    return trainer


if __name__ == "__main__":
    main()
