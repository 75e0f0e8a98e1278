"""Measures costs on the hosts that grow with processes: python -m benchmarks.hosts

Starts 1, 2, 4 and 8 processes on this machine, each with one faked device, and prints a
Markdown table of the figures of process 0. They share the cores, so with more processes
than cores the figures are upper bounds.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = (
    ("start", "`initialize()`, all started at once", "s"),
    ("meeting", "a meeting: median of 500", "ms"),
    ("best", "the same: the shortest", "ms"),
    ("exchange", "a value from each to each: median of 200", "ms"),
    ("save", "a checkpoint of 4 MB, until it is durable: median of 5", "ms"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="1,2,4,8")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    counts = [int(count) for count in arguments.processes.split(",")]
    found = [measure(count) for count in counts]
    print("| processes | " + " | ".join(map(str, counts)) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for name, text, unit in ROWS:
        values = [format(f[name], ".2g") if f.get(name) else "-" for f in found]
        print(f"| {text}, {unit} | " + " | ".join(values) + " |")


def measure(count: int) -> dict[str, float]:
    """Returns the figures of process 0 in a job of `count` processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.hosts", "--worker", folder],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ
                | {
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": "1",
                    "JAX_NUM_PROCESSES": str(count),
                    "JAX_PROCESS_ID": str(index),
                    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                },
            )
            for index in range(count)
        ]
        outputs = [process.communicate(timeout=900)[0] for process in processes]
    return json.loads(outputs[0].splitlines()[-1])


def work(folder: str) -> None:
    import equinox as eqx
    import jax

    import jaxdp
    from jaxdp.distributed import get_process_group

    found = {}
    # No process starts its work before all have finished their imports.
    Path(folder, f"there{os.environ['JAX_PROCESS_ID']}").touch()
    while len(list(Path(folder).glob("there*"))) < int(os.environ["JAX_NUM_PROCESSES"]):
        time.sleep(0.01)
    start = time.perf_counter()
    jaxdp.distributed.initialize()
    found["start"] = time.perf_counter() - start
    processes = get_process_group()
    if processes.count > 1:
        times = timed(500, lambda: processes.check_equal("a barrier", {}))
        found |= {"meeting": statistics.median(times), "best": min(times)}
        times = timed(200, lambda: processes.all_gather("a value", 1))
        found["exchange"] = statistics.median(times)
    model = eqx.nn.MLP(4, 4, 1000, 1, key=jax.random.key(0))
    model = eqx.nn.Sequential(
        [model, eqx.nn.Linear(4, 300_000 // 4, key=jax.random.key(1))]
    )
    trainer = jaxdp.Trainer(model, loss="mse", enable_progress_bar=False)
    paths = iter(range(9))
    trainer.save(f"{folder}/{next(paths)}")
    times = timed(5, lambda: trainer.save(f"{folder}/{next(paths)}"))
    found["save"] = statistics.median(times)
    if processes.index == 0:
        print(json.dumps(found), flush=True)


def timed(times: int, function) -> list[float]:
    """Returns the milliseconds of each call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(1000 * (time.perf_counter() - start))
    return found


if __name__ == "__main__":
    main()
