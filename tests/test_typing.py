"""Type checkers accept a user's script, and find its mistakes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import jaxdp

SCRIPT = """
from typing import assert_type

import equinox as eqx
import jax
import numpy as np
import optax

import jaxdp
from jaxdp.callbacks import EarlyStopping, ModelCheckpoint


class Net(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


net = Net(eqx.nn.Linear(4, 2, key=jax.random.key(0)))
net = jaxdp.lora(net, "layer", 2, key=jax.random.key(1))
trainer = jaxdp.Trainer(
    net,
    optax.adam(1e-3),
    loss="mse",
    metrics=["mae"],
    strategy=jaxdp.FSDP(min_size=128),
    precision="bf16-mixed",
    callbacks=[EarlyStopping("val_loss", patience=2), ModelCheckpoint("runs")],
)
loader = jaxdp.Arrays(np.ones((8, 4)), np.ones((8, 2)), batch_size=4)
history = trainer.fit(loader, loader, max_epochs=3)
assert_type(history, jaxdp.History)
assert_type(trainer.model, Net)
assert_type(trainer.validate(loader), dict[str, float])
assert_type(jaxdp.load_model("runs", net), Net)
model, state = jaxdp.load_model("runs", net, state=eqx.nn.State(net))
assert_type(model, Net)
assert_type(jaxdp.merge_lora(net), Net)
"""

MISTAKES = """
jaxdp.Trainer(net, precision="b16")
EarlyStopping(mode="lowest")
trainer.fit(loader, epochs=3)
"""


@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_a_script_is_well_typed_and_mistakes_are_not(checker, tmp_path):
    command = pathlib.Path(sys.executable).with_name(checker)
    if not command.exists():
        pytest.skip(f"{checker} is not installed")
    # Neither finds what is installed as editable.
    root = str(pathlib.Path(jaxdp.__file__).parents[1])
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [root]}))
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(SCRIPT + MISTAKES)
    options = {
        "pyright": ["--pythonpath", sys.executable],
        "mypy": ["--follow-imports=silent", "--ignore-missing-imports"],
    }
    done = subprocess.run(
        [str(command), *options[checker], "right.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": root},
        capture_output=True,
        text=True,
    )
    found = re.findall(r"(\w+)\.py:(\d+).*error", done.stdout)
    first = SCRIPT.count("\n") + 2
    expected = {("wrong", str(first + n)) for n in range(3)}
    assert {*found} == expected, done.stdout
