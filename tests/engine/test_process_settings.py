"""Settings of the process: the compilation cache, memory and convolutions."""

import gc
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from toys import batches, make_small

TRAIN = """
import json, resource, statistics
import jax, numpy as np, optax
from equinox import nn
import jaxdp
from jaxdp.callbacks import Callback

misses = []
jax.monitoring.register_event_listener(
    lambda event, **_: misses.append(event) if event.endswith("cache_misses") else None
)

class Faults(Callback):
    def on_fit_start(self, trainer):
        self.seen = []
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        float(metrics["loss"])
        self.seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    def of_a_step(self):
        steps = [b - a for a, b in zip(self.seen, self.seen[1:])]
        return statistics.quantiles(steps, n=4)[0]

faults = Faults()
model = nn.MLP(8, 8, 2048, 1, key=jax.random.key(0))
x = np.random.default_rng(0).normal(size=(3000, 8)).astype(np.float32)
trainer = jaxdp.Trainer(model, optax.sgd(0.1), callbacks=[faults])
history = trainer.fit([(x, x)] * 20)
print(json.dumps({
    "misses": len(misses), "faults": faults.of_a_step(), "loss": history["loss"],
    "folder": jax.config.jax_compilation_cache_dir,
}))
"""


FOLDER = """
import json, jax, jaxdp
from equinox import nn
jaxdp.Trainer(nn.Linear(1, 1, key=jax.random.key(0)))
print(json.dumps(jax.config.jax_compilation_cache_dir))
"""


def train(home, script=TRAIN, **environment):
    """Returns the output of a script with a home of its own."""
    names = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
    inherited = {k: v for k, v in os.environ.items() if k not in names}
    environment = {"HOME": str(home), "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", script]
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=inherited | environment, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A home, and the output of the first process in it."""
    home = tmp_path_factory.mktemp("home")
    return home, train(home)


@pytest.mark.slow
def test_a_second_process_loads_programs_from_the_cache(first):
    home, first = first
    second = train(home)
    assert first["misses"] >= 2  # the optimizer's first state, and the step
    assert second["misses"] == 0
    assert second["loss"] == first["loss"]
    assert first["folder"].startswith(str(home / ".cache" / "jaxdp"))


def test_a_cache_of_the_first_lines_keeps_programs_that_make_the_model(
    tmp_path, monkeypatch
):
    """The lines of docs/speed.md."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "speed.md"
    (lines,) = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    make = "from equinox import nn\nnn.Linear(1, 1, key=jax.random.key(0))\nprint(0)"
    train(tmp_path, lines + make)
    assert any((tmp_path / "runs" / "programs").iterdir())


@pytest.mark.slow
def test_freed_memory_is_reused_by_the_next_step(first, tmp_path):
    _, kept = first
    switches = {"JAXDP_KEEP_FREED_MEMORY": "0", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    given_back = train(tmp_path, **switches)
    # Lower quartiles: in one process of twenty, the arenas of glibc's threads take
    # turns, so that half of the steps allocate a block that another arena has free.
    assert given_back["faults"] > 100
    assert kept["faults"] < given_back["faults"] / 5
    assert kept["loss"] == given_back["loss"]
    assert given_back["folder"] is None


@pytest.mark.slow
def test_the_users_cache_and_a_read_only_home_are_not_changed(tmp_path):
    own = str(tmp_path / "own")
    settings = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    settings["JAX_COMPILATION_CACHE_DIR"] = own
    first = train(tmp_path, **settings)
    assert first["folder"] == own and first["misses"] > 5
    second = train(tmp_path / "another home", **settings)
    assert second["misses"] == 0 and second["loss"] == first["loss"]
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file", FOLDER) is None


CONVOLVE = """
import json, re
import jax, numpy as np, optax
from equinox import nn
import jaxdp

net = [nn.Conv2d(1, 20, 3, key=jax.random.key(0)), nn.Lambda(lambda x: x.mean((1, 2)))]
trainer = jaxdp.Trainer(nn.Sequential(net), optax.sgd(0.1))
trainer.fit([(np.ones((16, 1, 28, 28), np.float32), np.ones((16, 20), np.float32))])
entry = trainer.compiled_train_step().as_text().split("ENTRY")[1]
print(json.dumps(len(re.findall(r"= \\S+ convolution\\(", entry))))
"""


@pytest.mark.slow
def test_convolutions_on_cpus_run_in_eigen(tmp_path):
    # Those outside of a library's fusion: of the output, and of the kernel.
    assert train(tmp_path, CONVOLVE) == 2


@pytest.mark.parametrize("is_on", [True, False])
def test_tracing_pauses_the_garbage_collector(is_on):
    seen = []

    def loss_fn(model, x, y):
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            make_small(loss_fn=loss_fn).fit(batches(8))
    finally:
        after = gc.isenabled()
        gc.enable()
    assert seen and not any(seen)
    assert after == is_on
