"""A run that is killed anywhere is the same run afterwards, whatever it uses.

Of loaders, ways to train and moments of the kill, each is in a quick case; all moments
of each, and more of their pairs, are slow ones.
"""

import itertools
import warnings

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, batches, linear_on_one_device, quiet, rows
from twins import check_twins

from jaxdp import (
    FSDP,
    Arrays,
    Bitwise,
    Ensemble,
    LocalSGD,
    Members,
    Part,
    Pmap,
    Sharded,
    SingleDevice,
    ZeRO,
)
from jaxdp.callbacks import (
    EarlyStopping,
    GradientMonitor,
    LearningRateMonitor,
    NanGuard,
    ReduceLROnPlateau,
    WeightAveraging,
)

X, Y = rows(29)
DATA, VAL = batches(8, 8, 8, 5), batches(8, 8, seed=1)
STEPS = len(DATA)

MOMENTS = {
    "the first step": {1},
    "inside an epoch": {2},
    "the last step, before the validation": {STEPS},
    "after an epoch": {STEPS + 1},
    "the second epoch": {STEPS + 3},
    "the second fit": {STEPS + 4},
    "everywhere": None,
}
"""By the boundaries of a run: one after each step, and one after each epoch."""


class Stream:
    """An iterable that can't jump, with the same order in each pass."""

    def __iter__(self):
        yield from (DATA[i] for i in np.random.default_rng(5).permutation(STEPS))


class Telling:
    """Other orders in other passes, drawn at their starts; it tells where it is."""

    data = DATA

    def __init__(self):
        self.at, self.reads, self.generator = 0, 0, np.random.default_rng(0)
        self.order = self.generator.permutation(len(self.data)).tolist()

    def __iter__(self):
        while self.at < len(self.data):
            self.at, self.reads = self.at + 1, self.reads + 1
            yield self.data[self.order[self.at - 1]]
        self.at, self.order = 0, self.generator.permutation(len(self.data)).tolist()

    def state_dict(self):
        drawn = self.generator.bit_generator.state
        return {"at": self.at, "order": list(self.order), "generator": drawn}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]
        self.generator.bit_generator.state = state["generator"]


class Cycle:
    """An iterator without end that tells where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return DATA[(self.at - 1) % STEPS]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Draws:
    """A sampler of torch that draws by a generator of its own."""

    def __init__(self, torch, lists=False):
        self.torch, self.generator = torch, torch.Generator().manual_seed(3)
        self.lists = lists

    def __len__(self):
        return STEPS if self.lists else len(X)

    def __iter__(self):
        drawn = self.torch.randint(len(X), (len(X),), generator=self.generator)
        yield from (part.tolist() for part in drawn.split(8)) if self.lists else drawn


class Tells:
    """A sampler of torch that draws by a generator of NumPy, and tells."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return len(X)

    def __iter__(self):
        return iter(self.generator.permutation(len(X)).tolist())

    def state_dict(self):
        return self.generator.bit_generator.state

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state


def of_torch(make=lambda torch: {}, kind="DataLoader", size=8):
    """Makes loaders of torch, with the options that a function of torch gives."""

    def loader():
        torch = pytest.importorskip("torch")
        made = torch.utils.data.DataLoader
        if kind != "DataLoader":
            made = pytest.importorskip(
                "torchdata.stateful_dataloader"
            ).StatefulDataLoader
        pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        return made(pairs, **({"batch_size": size} if size else {}) | make(torch))

    return loader


def seeded(torch, **options):
    return {"shuffle": True, "generator": torch.Generator().manual_seed(3), **options}


def deep(torch):
    data = torch.utils.data
    sampler = data.RandomSampler(X, generator=torch.Generator().manual_seed(3))
    return {"batch_sampler": data.BatchSampler(sampler, 8, False)}


LOADERS = {
    "a list": lambda: DATA,
    "Arrays": lambda: Arrays(X, Y, batch_size=8),
    "Arrays on a device": lambda: Arrays(*jax.device_put((X, Y)), batch_size=8),
    "torch's": of_torch(lambda torch: {"shuffle": True}),
    "torch's, a generator": of_torch(seeded),
    "torch's, a sampler's": of_torch(lambda torch: {"sampler": Draws(torch)}),
    "torch's, its sampler's": of_torch(deep, size=None),
    "torch's, a batch sampler": of_torch(
        lambda torch: {"batch_sampler": Draws(torch, lists=True)}, size=None
    ),
    "torch's, a sampler that tells": of_torch(lambda torch: {"sampler": Tells()}),
    "torch's, workers": of_torch(
        lambda torch: {"batch_sampler": Draws(torch, lists=True), "num_workers": 2},
        size=None,
    ),
    "torchdata's": of_torch(seeded, "StatefulDataLoader"),
    "torchdata's, workers": of_torch(
        lambda torch: seeded(torch, num_workers=2), "StatefulDataLoader"
    ),
    "an iterable": Stream,
    "an iterable that tells": Telling,
    "an iterator that tells": Cycle,
    "a generator": lambda: (batch for _ in range(2) for batch in DATA),
    "an endless iterator": lambda: itertools.cycle(DATA),
}
ENDLESS = "a generator", "an endless iterator", "an iterator that tells"


def drawing(seed):
    """A loader of a validation, with a generator of its own."""
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(*map(torch.tensor, rows(24, seed=seed)))
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(data, 8, shuffle=True, generator=generator)


MANY = optax.MultiSteps(
    optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.cosine_decay_schedule(1e-2, 10)
    ),
    2,
).gradient_transformation()
INJECTED = optax.inject_hyperparams(optax.adam)(1e-2)


def stops(monitor="val_loss", patience=2):
    return EarlyStopping(monitor, patience=patience, min_delta=10.0)


def norm_net():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    return {"model": model, "state": state}


def ensemble():
    keys = jax.random.split(jax.random.key(0), 4)
    ensemble = Ensemble(4, learning_rate=[1e-3, 3e-3, 1e-2, 3e-2])
    return {"model": eqx.filter_vmap(Mlp)(keys), "ensemble": ensemble}


def loss_of_part(model, x, y, keys):
    logits = jax.vmap(lambda x, key: model(x, key=key))(x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def clip(model, step):
    bound = 0.3 - 0.01 * step
    return eqx.tree_at(
        lambda m: m.first.weight, model, model.first.weight.clip(-bound, bound)
    )


# What makes the trainer, and what is passed to `fit`.
WAYS = {
    "SingleDevice": lambda: {},
    "Sharded": lambda: {"strategy": Sharded(4)},
    "Pmap": lambda: {"strategy": Pmap(2)},
    "FSDP": lambda: {"strategy": FSDP(min_size=1)},
    "ZeRO": lambda: {"strategy": ZeRO(min_size=1)},
    "bitwise": lambda: {"strategy": Bitwise(Sharded(4))},
    "LocalSGD": lambda: {"strategy": LocalSGD(2, devices=4)},
    "an ensemble": lambda: {
        "optimizer": INJECTED, "strategy": Members(4), **ensemble()
    },
    "running statistics": lambda: {"strategy": Sharded(2), **norm_net()},
    "16-mixed": lambda: {"precision": "16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "accumulation": lambda: {"accumulate_grad_batches": 2},
    "blocks": lambda: {"steps_per_execution": 3},
    "averaged weights": lambda: {"callbacks": [WeightAveraging(0.5)]},
    "a schedule": lambda: {"optimizer": MANY, "callbacks": [LearningRateMonitor()]},
    "a plateau": lambda: {
        "optimizer": INJECTED,
        "callbacks": [ReduceLROnPlateau("loss", patience=0, min_delta=1e9)],
    },
    "guards": lambda: {"callbacks": [GradientMonitor(), NanGuard()]},
    "early stopping": lambda: {"callbacks": [stops()], "max_epochs": 4},
    "early stopping inside an epoch": lambda: {
        "callbacks": [stops()], "max_epochs": 4, "val_check_interval": 2,
    },
    "early stopping by the loss": lambda: {
        "callbacks": [stops("loss", 1)], "val_loader": None, "max_epochs": 4,
    },
    "validations inside epochs": lambda: {"val_check_interval": 2},
    "validations that draw": lambda: {
        "val_loader": {"a": drawing(1), "b": drawing(2)},
        "val_check_interval": 2,
        "limit_val_batches": 2,
    },
    "validations by a share": lambda: {"val_check_interval": 0.5},
    "blocks, validations": lambda: {
        "steps_per_execution": 3, "val_check_interval": 2
    },
    "max_steps": lambda: {"max_steps": 6},
    "max_steps at an epoch's end": lambda: {"max_steps": STEPS},
    "max_steps in blocks": lambda: {"steps_per_execution": 4, "max_steps": 6},
    "max_steps, validations": lambda: {"max_steps": 6, "val_check_interval": 2},
    "parts": lambda: {
        "loss": None, "optimizer": [Part(name, loss_of_part, optax.adam(1e-2), every=n)
                                    for n, name in enumerate(["first", "last"], 1)],
    },
    "after_update": lambda: {"after_update": clip},
    "overfit_batches": lambda: {"overfit_batches": 3},
}  # fmt: skip
OF_FIT = (
    "val_loader",
    "val_check_interval",
    "limit_val_batches",
    "max_epochs",
    "max_steps",
    "overfit_batches",
)

QUICK = [
    ("a list", "validations inside epochs", "everywhere"),
    ("a list", "SingleDevice", "the second fit"),
    ("a list", "a schedule", "the last step, before the validation"),
    ("a list", "a plateau", "after an epoch"),
    ("a list", "averaged weights", "inside an epoch"),
    ("a list", "early stopping", "after an epoch"),
    ("Arrays", "Sharded", "inside an epoch"),
    ("Arrays", "blocks", "inside an epoch"),
    ("Arrays on a device", "FSDP", "the second epoch"),
    ("torch's", "Pmap", "inside an epoch"),
    ("torch's, a generator", "validations that draw", "inside an epoch"),
    ("torch's, a generator", "SingleDevice", "after an epoch"),
    ("torch's, a generator", "SingleDevice", "the second fit"),
    ("torch's, a sampler's", "16-mixed", "inside an epoch"),
    ("torch's, its sampler's", "guards", "the second epoch"),
    ("torch's, a batch sampler", "SingleDevice", "after an epoch"),
    ("torch's, a sampler that tells", "SingleDevice", "the second epoch"),
    ("torch's, workers", "SingleDevice", "inside an epoch"),
    ("torchdata's", "SingleDevice", "the last step, before the validation"),
    ("an iterable", "SingleDevice", "the second epoch"),
    ("an iterable that tells", "accumulation", "the first step"),
    ("an iterator that tells", "SingleDevice", "the last step, before the validation"),
    ("a generator", "running statistics", "the last step, before the validation"),
    ("an endless iterator", "SingleDevice", "inside an epoch"),
]
SLOW = [
    *itertools.product(LOADERS, ["SingleDevice"], ["everywhere"]),
    *itertools.product(["a list"], WAYS, ["everywhere"]),
    *itertools.product(
        ["torch's, a generator", "an iterable that tells"],
        ["accumulation", "blocks, validations"],
        ["everywhere"],
    ),
    *itertools.product(["a list"], ["Sharded", "LocalSGD"], ["the second fit"]),
]


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("loader, way, moment", [
    pytest.param(
        *case,
        marks=[pytest.mark.slow] * (case not in QUICK),
    )
    for case in dict.fromkeys([*QUICK, *SLOW])
])  # fmt: skip
def test_a_run_goes_on_as_its_twin(tmp_path, loader, way, moment):
    settings = {"max_epochs": 2, "val_loader": VAL}
    if loader in ENDLESS:
        settings["limit_train_batches"] = STEPS

    def make(own):
        options = {
            "model": Mlp(jax.random.key(0)),
            "optimizer": optax.adam(1e-2),
            "strategy": SingleDevice(),
            "loss": "cross_entropy",
        } | {name: value for name, value in WAYS[way]().items() if name not in OF_FIT}
        return quiet(**options | {"callbacks": [*options.get("callbacks", ()), *own]})

    def fit(trainer, **more):
        batches = LOADERS[loader]()
        own = {name: each for name, each in WAYS[way]().items() if name in OF_FIT}
        options = settings | own
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`fit` has nothing to do")
            if moment == "the second fit" and not more:
                trainer.fit(batches, **options | {"max_epochs": 1})
            trainer.fit(batches, **options, **more)

    which = MOMENTS[moment]
    check_twins(tmp_path, make, fit, which)


@pytest.mark.slow
def test_a_run_that_was_to_stop_goes_on_with_more_patience(tmp_path):
    def trainer(patience):
        return linear_on_one_device(stops(patience=patience))

    first = trainer(1)
    first.fit(DATA, VAL, max_epochs=9)
    assert first.current_epoch == 2
    path = first.save(tmp_path / "saved")
    for patience, epochs in ((1, 2), (3, 4)):
        again = trainer(patience)
        again.fit(DATA, VAL, max_epochs=9, ckpt_path=path)
        assert again.current_epoch == epochs
