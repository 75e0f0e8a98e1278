"""Measures one accelerator in ten minutes: correctness, speed, memory, bits.

python -m benchmarks.gpu --output FOLDER [--only steps,bits] [--toy]

Each part runs in a process of its own, under a time limit of its own. Together they
take 560 seconds at most. After each measurement, a part writes all that it has so far
to FOLDER/PART.json, so a part that hangs or dies keeps its results and stops no other
part. A table of all parts is printed last, and written to FOLDER/gpu.md. Needs jax,
equinox, optax and no network; torch, if it is installed, loads the batches. `--toy`
runs everything at a tiny size on any device.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..processes import ROOT
from ..report import describe_machine


class Part(NamedTuple):
    """A module beside this one.

    It has `measure(toy)`, which yields pairs of a name and a JSON value, and
    `format_rows(found)`, which yields pairs of texts for the table. As long as it
    measures in processes of their own, it does not use the device itself: JAX would
    reserve most of the memory for it.
    """

    title: str
    time_limit: int  # in seconds


PARTS: Final = {
    "correct": Part("does it compute right?", 40),
    "feeding": Part("batches to the device, beside a step that computes", 60),
    "steps": Part("steps beside a loop by hand, and MFU", 230),
    "bits": Part("the same bits again", 90),
    "memory": Part("plans beside the memory in use, offload, too large batches", 140),
}


def run(
    part: str, folder: Path, device: dict[str, str], *, toy: bool
) -> dict[str, Any]:
    """Measures a part in a process of its own; its file also describes the device.

    Returns:
        `{"found": ...}`, with `"failed"`, the end of the output, if it did not end well
        or in time.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part]
    command += ["--output", str(folder), *(["--toy"] if toy else [])]
    path, begin = folder / f"{part}.json", time.perf_counter()
    path.unlink(missing_ok=True)
    limit, failed = PARTS[part].time_limit, ""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # its own processes are killed with it
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            if process.returncode:
                failed = f"exit code {process.returncode}: {output[-1500:]}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            failed = f"not done within {limit} seconds"
    found = json.loads(path.read_text()) if path.exists() else {}
    result: dict[str, Any] = {**device, "found": found}
    if failed:
        result["failed"] = failed
    result["seconds"] = round(time.perf_counter() - begin, 1)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure_here(part: str, folder: Path, *, toy: bool) -> None:
    """Measures a part in this process, and writes each result when it is there."""
    found = {}
    module = importlib.import_module(f".{part}", __package__)
    for name, value in module.measure(toy):
        found[name] = value
        partial = folder / f"{part}.partial"
        partial.write_text(json.dumps(found))
        partial.replace(folder / f"{part}.json")  # whole, even if it is killed here


def format_table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the Markdown table of all parts."""
    devices = {result["device"] for result in results.values() if "device" in result}
    lines = [f"{', '.join(sorted(devices)) or 'no device'}.", ""]
    lines += ["| part | measured | result |", "|---|---|---|"]
    for part, result in results.items():
        module = importlib.import_module(f".{part}", __package__)
        rows = [*module.format_rows(result.get("found", {}))]
        if "failed" in result:
            rows.append(("FAILED", result["failed"][-300:]))
        for name, value in rows:
            cells = (" ".join(str(cell).split()) for cell in (part, name, value))
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
    device = _describe_device()
    if not args.toy and device["platform"] == "cpu":
        parser.error("this needs a GPU or TPU, and JAX has a CPU; `--toy` runs on it.")

    results = {}
    for name in names:
        print(f"{name}: {PARTS[name].title} ...", flush=True)
        results[name] = run(name, args.output, device, toy=args.toy)
        print(f"  {results[name]['seconds']} s", flush=True)
    table = format_table(results)
    (args.output / "gpu.md").write_text(table)
    print(f"\n{table}\nwritten to {args.output}")
    return int(any("failed" in result for result in results.values()))


def _describe_device() -> dict[str, str]:
    """Returns the kind of the device; a process finds it, and then frees its memory."""
    code = (
        "import jax, json\nfirst, *_ = devices = jax.devices()\nprint(json.dumps("
        "{'device': f'{len(devices)} x {first.device_kind}', 'platform': first.platform"
        ", 'version': first.client.platform_version}))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    device = json.loads(asked.stdout.strip().rpartition("\n")[2])
    return {**device, "machine": describe_machine()}


if __name__ == "__main__":
    sys.exit(main())
