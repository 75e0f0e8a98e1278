"""A mistake in a user's code: what is printed ends with that code, and its message.

A warning is one of that code.
"""

import linecache
import os
import subprocess
import sys
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import On, batches, make_small, quiet

import jaxdp
from jaxdp import Callback
from jaxdp.basics import console

torch = pytest.importorskip("torch")

SCRIPT = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
import jaxdp

class Net(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer(x) @ jnp.ones((5, 2))  # the mistake

def train():
    net = Net(eqx.nn.Linear(4, 2, key=jax.random.key(0)))
    trainer = jaxdp.Trainer(net, loss="mse", enable_progress_bar=False)
    trainer.fit([(np.ones((8, 4)), np.ones((8, 2)))])

train()
"""


@pytest.mark.slow_cases("off")
@pytest.mark.parametrize("filtering", ["auto", "off"])
def test_a_script_prints_the_users_lines_and_little_else(tmp_path, filtering):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.path.dirname(os.path.dirname(jaxdp.__file__))
    environment = {"JAX_TRACEBACK_FILTERING": filtering, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    printed = done.stderr[done.stderr.index("Traceback") :].splitlines()
    frames = [line.split('"')[1] for line in printed if line.startswith('  File "')]
    end = [n for n, line in enumerate(printed) if "# the mistake" in line][-1]
    if filtering == "off":
        assert len(frames) > 25 and sum("jaxdp" in each for each in frames) > 15
        return

    # The script's two lines, where it went in, and the mistake.
    assert [os.path.basename(each) for each in frames] == [
        *["script.py"] * 2,
        "arguments.py",
        "trainer.py",
        "script.py",
    ]
    assert "contracting dimensions" in printed[end + 2]
    assert printed[end + 1].strip(" ~^") == ""
    one = "the model was called on one example, of shape (4,) (jax.vmap adds the batch)"
    assert printed[end + 3] == one
    assert len(printed) - end <= 7


def loss_fn(model, x, y):
    raise ZeroDivisionError("in the loss")


def fail(trainer, metrics, batch_idx):
    raise ZeroDivisionError("in a callback")


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise ZeroDivisionError("in the data")


def gives():
    yield batches(8)[0]
    raise ZeroDivisionError("in the data")


class Predicting(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        raise ZeroDivisionError("in the model")


MODEL = Predicting(jnp.ones(3))

CASES = {
    "loss": lambda: make_small(loss_fn=loss_fn).fit(batches(8)),
    "callback": lambda: make_small(callbacks=[On(on_train_batch_end=fail)]).fit(
        batches(8)
    ),
    "dataset": lambda: make_small().fit(torch.utils.data.DataLoader(Rows(), 4)),
    "generator": lambda: make_small().fit(gives()),
    "validate": lambda: make_small(loss_fn=loss_fn).validate(batches(8)),
    "test": lambda: make_small(loss_fn=loss_fn).test(batches(8)),
    "predict": lambda: quiet(MODEL).predict(batches(8)),
    "steps": lambda: list(make_small(loss_fn=loss_fn).steps(batches(8))),
    "plan": lambda: make_small(loss_fn=loss_fn).plan(batches(8)),
    "compare": lambda: make_small(loss_fn=loss_fn).compare(batches(8)),
}


@pytest.mark.slow_but("dataset", "generator", "predict", "compare")
@pytest.mark.parametrize("case", CASES)
def test_wherever_it_is_the_last_frame_is_the_users(case):
    with pytest.raises(ZeroDivisionError) as caught:
        CASES[case]()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__
    assert frames[-1].line.startswith("raise ZeroDivisionError")
    ours = os.path.dirname(jaxdp.__file__)
    assert sum(each.filename.startswith(ours) for each in frames) <= 2
    notes = [note for note in caught.value.__notes__ if "FILTERING=off" in note]
    assert len(notes) == 1


def test_a_layer_that_does_not_fit_is_named_though_no_line_is_the_users():
    model = eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0))
    with pytest.raises(TypeError) as caught:
        quiet(model, loss="mse").fit([(np.ones((8, 4)), np.ones((8, 3)))])
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "equinox/nn/_linear.py" in frames[-1].filename
    assert len(frames) < 10


def test_where_no_code_of_the_users_ran_all_frames_stay():
    with pytest.raises(TypeError, match="not an iterable of batches") as caught:
        make_small().fit(3)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "open_loader"
    assert not hasattr(caught.value, "__notes__")


def test_what_an_error_came_of_is_the_users_too():
    class Fails(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            try:
                return jnp.dot(self.weight, jnp.ones(5))
            except TypeError as error:
                raise ValueError("no product") from error

    with pytest.raises(ValueError, match="no product") as caught:
        quiet(Fails(jnp.ones(4)), loss="mse").predict([np.ones((8, 4))])
    cause = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert [each.line for each in cause] == ["return jnp.dot(self.weight, jnp.ones(5))"]


def fit_again():
    trainer = make_small()
    trainer.fit(batches(8))
    trainer.fit(batches(8))  # the line


def warn_in_a_hook():
    class Warns(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            console.warn("of ours")  # the line

    make_small(callbacks=[Warns()]).fit(batches(8))


@pytest.mark.parametrize("way", [fit_again, warn_in_a_hook])
def test_a_warning_shows_the_line_of_the_user_that_led_to_it(way):
    with pytest.warns(UserWarning) as caught:
        way()
    where = caught[-1]
    assert where.filename == __file__
    assert linecache.getline(where.filename, where.lineno).endswith("# the line\n")


def test_a_mistake_that_optax_finds_shows_optax_and_little_else():
    optimizer = optax.masked(optax.sgd(0.1), {"no": True})  # of another structure
    with pytest.raises(ValueError) as caught:
        make_small(optimizer=optimizer).fit(batches(8))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any("/optax/" in each.filename for each in frames)
    assert len(frames) < 10
