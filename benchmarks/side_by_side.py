"""Six trainings as a loop by hand and with jaxdp: lines, times and last values.

python -m benchmarks.side_by_side [--only mnist,ppo] [--turns 3] [--write]

Each run is a process of its own, in turns; compilation counts. With `--write` the table
goes into docs/recipes/examples.md. JAXDP_DATA_DIR is the folder with the data of four.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
from typing import Any

from .processes import ROOT

NAMES = ("mnist", "diffusion", "bert", "neural_ode", "nanogpt", "ppo")
TITLES = {
    "mnist": "Fashion-MNIST",
    "diffusion": "Score-based diffusion",
    "bert": "A BERT-like classifier",
    "neural_ode": "A neural ODE",
    "nanogpt": "nanoGPT",
    "ppo": "PPO",
}
"""Its name on the page."""
WAYS = ("by_hand", "with_jaxdp")
SHOWN = {
    "mnist": "val_accuracy",
    "bert": "val_accuracy",
    "nanogpt": "val_loss",
    "ppo": "moves",
}
"""Whose last value is in the table; of the others it is the loss."""
PAGE = ROOT / "docs" / "recipes" / "examples.md"

ONE_RUN = """
import importlib, json, sys, time
module = importlib.import_module("side_by_side." + sys.argv[1])
begin, busy = time.perf_counter(), time.process_time()
history = getattr(module, sys.argv[2])()
seconds = time.perf_counter() - begin, time.process_time() - busy
last = float(history[sys.argv[3]][-1])
print(json.dumps([*seconds, last]))
"""


def code_of(name: str, way: str) -> str:
    """Returns the source of one of the two functions of a training."""
    return inspect.getsource(getattr(_module(name), way))


def lines_of(name: str, way: str) -> int:
    """Returns the number of its lines that are not blank."""
    return sum(bool(line.strip()) for line in code_of(name, way).splitlines())


def _module(name: str) -> Any:
    examples = str(ROOT / "examples")
    if examples not in sys.path:
        sys.path.insert(0, examples)
    return importlib.import_module(f"side_by_side.{name}")


def run(name: str, way: str) -> list[float]:
    """Returns wall-clock seconds, processor seconds, and the last value."""
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT)])
    command = [sys.executable, "-c", ONE_RUN, name, way, SHOWN.get(name, "loss")]
    done = subprocess.run(
        command,
        # A trainer keeps programs for the next run; a loop by hand does not.
        env=os.environ | {"PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} {way} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name: str, turns: int) -> str:
    """Returns a line of the table."""
    rounds = [[run(name, way) for way in WAYS] for _ in range(turns)]
    cells = []
    for part in range(2):  # wall clock, processors
        pair = [statistics.median(r[way][part] for r in rounds) for way in range(2)]
        cells.append(f"{pair[0]:.1f} / {pair[1]:.1f} s")
    last = [rounds[0][way][2] for way in range(2)]
    lines = " / ".join(str(lines_of(name, way)) for way in WAYS)
    what = f"{SHOWN.get(name, 'loss')} {last[0]:.4g} / {last[1]:.4g}"
    return f"| {title_of(name)} | {lines} | {' | '.join(cells)} | {what} |"


def title_of(name: str) -> str:
    """Returns the first cell of the row of a training."""
    return f"{TITLES[name]} (`{name}.py`)"


def page_with(rows: dict[str, str], text: str) -> str:
    """Returns the page with new rows in its table."""
    for name, row in rows.items():
        pattern = rf"^\| {re.escape(title_of(name))} .*$"
        text = re.sub(pattern, row, text, flags=re.M)
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--only", default=",".join(NAMES), help="of them, by comma")
    parser.add_argument("--turns", type=int, default=3, help="of which the median")
    parser.add_argument("--write", action="store_true", help="into the page")
    args = parser.parse_args(argv)
    rows = {}
    for name in args.only.split(","):
        rows[name] = row_of(name, args.turns)
        print(rows[name], flush=True)
    if args.write:
        PAGE.write_text(page_with(rows, PAGE.read_text()))


if __name__ == "__main__":
    main()
