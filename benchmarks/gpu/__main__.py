"""On one accelerator, in ten minutes: does it compute right, how fast, what fits?

python -m benchmarks.gpu --output FOLDER [--only steps,bits] [--toy]

Eight parts, each a process of its own, so that one that hangs or dies takes no other
along. What a part has found is in FOLDER/PART.json as soon as it ends; a table of all
comes last, and into FOLDER/gpu.md. Needs jax, equinox, optax and no network; torch, if
it is there, loads the batches. `--toy` runs everything at a tiny size on any device.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from ..processes import ROOT

PARTS: Final = {
    "canaries": "does it compute right?",
    "feeding": "batches to the device",
    "steps": "steps beside a loop by hand, and MFU",
    "plans": "plans beside the memory that was used",
    "bits": "the same bits again",
    "offload": "optimizer state on the host, checkpoints",
    "options": "options of the compiler",
    "overflow": "more than fits",
}
"""Modules beside this one. Each has `measure(toy)`, which returns what JSON takes, and
`rows(found)`, lines of the table: what, and what was found."""

SECONDS: Final = 900
"""After which a part is given up."""


def run(part: str, folder: Path, *, toy: bool) -> dict[str, Any]:
    """Measures a part in a process of its own.

    Returns:
        `{"found": ...}`, or `{"failed": the end of what it printed}`.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part]
    command += ["--output", str(folder), *(["--toy"] if toy else [])]
    path, begin = folder / f"{part}.json", time.perf_counter()
    path.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True
        )
        said, why = done.stdout + done.stderr, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        said, why = "", f"no answer within {SECONDS} seconds"
    result = json.loads(path.read_text()) if path.exists() else {}
    if not result:
        result = {"failed": f"{why}: {said[-1500:]}"}
    result["seconds"] = round(time.perf_counter() - begin, 1)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure_here(part: str, folder: Path, *, toy: bool) -> None:
    """What the process of a part does."""
    import jax

    from ..report import describe_machine

    module = importlib.import_module(f".{part}", __package__)
    device = jax.devices()[0]
    result = {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "platform": device.client.platform_version,
        "machine": describe_machine(),
        "found": module.measure(toy),
    }
    (folder / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """A table of all parts."""
    devices = {result["device"] for result in results.values() if "device" in result}
    lines = [f"{', '.join(sorted(devices)) or 'no device'}.", ""]
    lines += ["| part | what | found |", "|---|---|---|"]
    for part, result in results.items():
        if "failed" in result:
            rows = [("FAILED", result["failed"][-300:])]
        else:
            module = importlib.import_module(f".{part}", __package__)
            rows = module.rows(result["found"])
        for what, value in rows:
            cells = (" ".join(str(cell).split()) for cell in (part, what, value))
            lines.append(f"| {' | '.join(c.replace('|', '/') for c in cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measures, writes and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument(
        "--toy", action="store_true", help="tiny, to see whether it runs"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # for the children
    args = parser.parse_args(argv)
    args.output = args.output.absolute()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.part:
        measure_here(args.part, args.output, toy=args.toy)
        return 0
    names = args.only.split(",") if args.only else list(PARTS)
    for name in names:
        if name not in PARTS:
            parser.error(f"`--only` has {name!r}; there are {', '.join(PARTS)}.")
    if not args.toy and _platform() == "cpu":
        parser.error("this needs a GPU or TPU, and JAX has a CPU; `--toy` runs on it.")

    results = {}
    for name in names:
        print(f"{name}: {PARTS[name]} ...", flush=True)
        results[name] = run(name, args.output, toy=args.toy)
        print(f"  {results[name]['seconds']} s", flush=True)
    table = markdown(results)
    (args.output / "gpu.md").write_text(table)
    print(f"\n{table}\nwritten to {args.output}")
    return int(any("failed" in result for result in results.values()))


def _platform() -> str:
    """What JAX computes on, asked of another process: this one takes no memory."""
    code = "import jax; print(jax.devices()[0].platform)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return asked.stdout.strip().rpartition("\n")[2] or "cpu"


if __name__ == "__main__":
    sys.exit(main())
