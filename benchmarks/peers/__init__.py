"""One file for each way to train: `train(work, clock) -> weights`.

`train` starts from `work.weights()`, trains `work.epochs` epochs on the same batches in
the same order as everybody else, calls `clock()` at the end of each epoch, when the
device is done with it, and returns the trained weights as NumPy arrays in the order
and shapes of `work.weights()`. What it needs it imports itself.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


class Skip(Exception):
    """Raised by a peer that cannot do a work here, with the reason."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to train.

    Args:
        title: for tables.
        module: the file in this folder that has `train`.
        needs: packages besides jaxdp's own that must be installed.
        options: more arguments of `train`.
        works: the works it is for; all on one device if empty.
    """

    title: str
    module: str
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    works: tuple[str, ...] = ()

    def does(self, work: Any) -> bool:
        return work.name in self.works if self.works else work.devices == 1

    def train(self, work: Any, clock: Callable[[], None]) -> Any:
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                raise Skip(f"{package} is not installed")
        module = importlib.import_module(f".{self.module}", __name__)
        return module.train(work, clock, **self.options)


_ALL = ("W1", "W1s", "W2", "W3", "W4", "W5", "W5w", "W6")
_BY_32 = {"steps_per_execution": 32}

PEERS = {
    "expert": Peer("E, the expert's loop", "expert", works=_ALL),
    "jaxdp": Peer("jaxdp", "jaxdp_fit", works=_ALL),
    "jaxdp32": Peer(
        "jaxdp, 32 steps",
        "jaxdp_fit",
        options=_BY_32,
        works=tuple(work for work in _ALL if work != "W2"),  # it has convolutions
    ),
    "jaxdp_ready": Peer(
        "jaxdp, ready batches",
        "jaxdp_fit",
        options={"ready": True},
        works=("W1", "W1s", "W4", "W6"),
    ),
    "jaxdp_pmap": Peer(
        "jaxdp, Pmap", "jaxdp_fit", options={"strategy": "Pmap"}, works=("W6",)
    ),
    "expert_flat": Peer(
        "E with a flat list of leaves",
        "expert",
        options={"flat": True},
        works=("W1", "W4"),
    ),
    "expert_loader": Peer("E from a DataLoader", "expert_loader"),
    "tutorial": Peer("Equinox tutorial", "tutorial", works=_ALL),
    "keras": Peer("Keras", "keras_fit", ("keras",), works=_ALL),
    "keras32": Peer(
        "Keras, 32 steps",
        "keras_fit",
        ("keras",),
        _BY_32,
        ("W1", "W1s", "W4"),
    ),
    "nnx": Peer("Flax NNX", "nnx", ("flax",)),
    "torch": Peer("torch, eager", "eager"),
    "lightning": Peer("Lightning", "lightning_fit", ("lightning",)),
    "lightning_bare": Peer(
        "Lightning, all off",
        "lightning_fit",
        ("lightning",),
        {"bare": True},
        ("W1", "W4"),
    ),
    "loading": Peer("loading alone", "loading", works=("W5", "W5w")),
    "computing": Peer("computing alone", "computing", works=("W5", "W5w")),
}
