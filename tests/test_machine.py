"""What is kept on a machine: programs between runs, memory between steps."""

import json
import os
import subprocess
import sys

TRAIN = """
import json, resource
import jax, numpy as np, optax
from equinox import nn
import jaxdp
from jaxdp.callbacks import Callback

misses = []
jax.monitoring.register_event_listener(
    lambda event, **_: misses.append(event) if event.endswith("cache_misses") else None
)

class Faults(Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        float(metrics["loss"])
        if batch_idx == 9:
            self.before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def on_fit_end(self, trainer):
        self.count = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.before

faults = Faults()
model = nn.MLP(8, 8, 2048, 1, key=jax.random.key(0))
x = np.random.default_rng(0).normal(size=(4000, 8)).astype(np.float32)
trainer = jaxdp.Trainer(model, optax.sgd(0.1), callbacks=[faults])
history = trainer.fit([(x, x)] * 20)
print(json.dumps({
    "misses": len(misses), "faults": faults.count, "loss": history["loss"],
    "folder": jax.config.jax_compilation_cache_dir,
}))
"""


def train(home, **environment):
    """What `TRAIN` prints, and what it says, in a process with a home of its own."""
    names = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
    inherited = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        env=inherited | {"HOME": str(home), "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    first, said = train(tmp_path)
    second, _ = train(tmp_path)
    assert first["misses"] > 5
    assert second["misses"] == 0
    assert second["loss"] == first["loss"]
    assert first["folder"].startswith(str(tmp_path / ".cache" / "jaxdp"))
    assert "JAXDP_KEEP_FREED_MEMORY" in said


def test_memory_of_temporaries_is_kept_for_the_next_step(tmp_path):
    kept, _ = train(tmp_path)
    switches = {"JAXDP_KEEP_FREED_MEMORY": "0", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    given_back, said = train(tmp_path, **switches)
    assert kept["faults"] < given_back["faults"] / 5
    assert kept["loss"] == given_back["loss"]
    assert given_back["folder"] is None
    assert "KEEP_FREED" not in said


def test_the_users_own_cache_and_a_read_only_home_are_left_alone(tmp_path):
    own = str(tmp_path / "own")
    found, _ = train(tmp_path, JAX_COMPILATION_CACHE_DIR=own)
    assert found["folder"] == own
    (tmp_path / "file").write_text("")
    found, _ = train(tmp_path / "file")
    assert found["folder"] is None
