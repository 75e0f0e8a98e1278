"""Texts and pictures that a model makes, shown while it trains."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..basics.arguments import check_is_local, checks_arguments
from ..basics.files import expand_path, write_text_atomically
from ..callbacks.base import Callback, Trainer
from ..callbacks.logger import Logger, check_writable
from ..callbacks.monitor import is_fitting
from .figures import save_figure
from .import_package import import_package


class Samples(Callback):
    """Shows texts and pictures that a function makes of the model at each validation.

        def make(model):
            text = decode(generate(model, "Once upon a time"))
            return {"story": text, "digits": jax.vmap(model)(noise)[0]}

        Trainer(model, callbacks=[Samples(make), TensorBoardLogger()])

    Each is written to a file, `<dirpath>/<name>/<step>.txt` or `.png`, and handed to
    loggers that can show it: TensorBoard, W&B, MLflow, and your own with a `log_text`
    or `log_figure`.

    Args:
        make: a function of the model, in inference mode and with its state inside, as
            `trainer.inference_model()` returns it. It returns a dict by name: texts;
            pictures, as arrays `(height, width)` or `(height, width, 3 or 4)` of bytes
            or of floats from 0 to 1; or `matplotlib` figures.
        dirpath: the folder; None means `samples` in `trainer.default_root_dir`.
    """

    skip_in_fast_dev_run = True
    only_in_training = True

    @checks_arguments
    def __init__(
        self,
        make: Callable[[Any], Mapping[str, Any]],
        dirpath: str | os.PathLike[str] | None = None,
    ):
        if not callable(make):
            raise TypeError(
                f"`make` must be a function of the model; got {make!r} of type"
                f" {type(make).__name__}."
            )
        if dirpath is not None:
            check_is_local("dirpath", dirpath)
            dirpath = expand_path(dirpath)
        self.make, self.dirpath = make, dirpath

    def setup(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            check_writable(self._folder(trainer), "Samples")

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if not is_fitting(trainer):
            return
        # In all processes: the arrays of the model may be split between them.
        outputs = self.make(trainer.inference_model())
        if not isinstance(outputs, Mapping):
            raise TypeError(
                "`make` must return a dict of texts, pictures or figures by name; it"
                f" returned {type(outputs).__name__}."
            )
        if trainer.is_global_zero:
            for name, value in outputs.items():
                self._show(trainer, name, value)

    def _show(self, trainer: Trainer, name: str, value: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w .-]*", name):
            raise ValueError(
                f"`make` returned something named {name!r}; a name is of letters,"
                " digits, spaces and `_.-`, as it becomes that of a folder."
            )
        loggers = [c for c in trainer.callbacks if isinstance(c, Logger)]
        folder = self._folder(trainer) / name
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(value, str):
            write_text_atomically(folder / f"{trainer.global_step}.txt", value)
            for logger in loggers:
                logger.log_text(name, value)
            return
        figure = value if hasattr(value, "savefig") else _make_figure(name, value)
        save_figure(figure, folder / f"{trainer.global_step}.png")
        for logger in loggers:
            logger.log_figure(name, figure)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or expand_path(trainer.default_root_dir) + "/samples")


def _make_figure(name: str, value: Any) -> Any:
    """Makes a figure with the pixels of an array."""
    figure = import_package("matplotlib.figure", "plots", "a picture of `Samples`")
    pixels = np.asarray(value)  # waits for the device
    is_picture = pixels.ndim == 2 or pixels.ndim == 3 and pixels.shape[2] in (3, 4)
    if (
        not is_picture
        or pixels.dtype.kind not in "fub"
        and pixels.dtype.name != "bfloat16"
    ):
        raise TypeError(
            f"`make` returned {type(value).__name__} for {name!r}, of shape"
            f" {pixels.shape} and dtype {pixels.dtype}. It may be a text, a matplotlib"
            " figure or an array (height, width) or (height, width, 3 or 4) of bytes or"
            " floats from 0 to 1."
        )
    if pixels.dtype.kind != "u":
        pixels = np.clip(pixels.astype(np.float32), 0, 1)
    height, width = pixels.shape[:2]
    drawn = figure.Figure(figsize=(width, height), dpi=1)
    limits = {"vmin": 0, "vmax": 255 if pixels.dtype.kind == "u" else 1}
    drawn.figimage(pixels, cmap="gray", **limits)
    return drawn
