"""Texts and pictures that are made by the model at each validation."""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, batches

from jaxdp import Trainer
from jaxdp.callbacks import Logger, Samples

pyplot = pytest.importorskip("matplotlib.pyplot")


class Shown(Logger):
    """Keeps what it is given to show."""

    def __init__(self, dirpath):
        super().__init__(dirpath)
        self.texts, self.sizes = [], []

    def log(self, epoch, step, values):
        pass

    def log_text(self, name, text):
        if name != "plan":
            self.texts.append((name, text))

    def log_figure(self, name, figure):
        self.sizes.append((name, *(figure.get_size_inches() * figure.dpi)))


def trainer_of(callbacks, folder):
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    options = {"state": state, "default_root_dir": folder}
    options |= {
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
        "loss": "cross_entropy",
    }
    return Trainer(model, optax.sgd(0.1), callbacks=callbacks, **options)


def test_texts_and_pictures_are_made_at_each_validation(tmp_path):
    seen = []

    def make(model):
        seen.append(float(model(jnp.ones(4))[0]))
        picture = np.zeros((20, 29), np.uint8)
        picture[5, 7] = 255
        figure = pyplot.Figure(figsize=(2, 1), dpi=50)
        text = f"it says {seen[-1]:.6f}"
        return {
            "text": text,
            "gray": picture,
            "color": jnp.ones((8, 9, 3)),
            "fig": figure,
        }

    shown = Shown(tmp_path)
    trainer = trainer_of([Samples(make), shown], tmp_path)
    trainer.fit(batches(16, 16), batches(16), max_epochs=2)
    trainer.validate(batches(16))  # on its own: nothing is made
    folder = tmp_path / "samples"
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.*"))
    names = "color/2.png color/4.png fig/2.png fig/4.png gray/2.png gray/4.png"
    assert files == [*names.split(), "text/2.txt", "text/4.txt"]
    assert (folder / "text" / "4.txt").read_text() == f"it says {seen[1]:.6f}"
    assert len(seen) == 2 and seen[0] != seen[1]
    assert seen[1] == pytest.approx(float(trainer.inference_model()(jnp.ones(4))[0]))
    pixels = pyplot.imread(folder / "gray" / "2.png")
    assert pixels.shape[:2] == (20, 29)
    assert pixels[5, 7, 0] == 1 and pixels[..., 0].sum() == 1
    assert [name for name, _ in shown.texts] == ["text", "text"]
    assert shown.sizes[:3] == [("gray", 29, 20), ("color", 9, 8), ("fig", 100, 50)]


WRONG = {
    "it returned list": lambda model: ["text"],
    "something named '../up'": lambda model: {"../up": "text"},
    "of shape \\(3,\\) and dtype float32": lambda model: {"x": np.ones(3, np.float32)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cant_be_shown_is_named(message, tmp_path):
    trainer = trainer_of([Samples(WRONG[message])], tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.fit(batches(16), batches(16))
    assert not (pathlib.Path(tmp_path) / "up").exists()
