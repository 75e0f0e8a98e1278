"""The commands, and the options that each takes."""

import argparse
import glob
import inspect
import itertools
import json
import os
import runpy
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..basics.console import columns, end_quietly
from ..basics.environment import import_extra, versions
from ..basics.files import replacing
from ..basics.hardware import note_on_kinds
from ..basics.host_memory import HOST
from ..checkpoint import read_weights
from ..fit import instead_of_training
from ..reports import comparison, differences, read_run, write_comparison, write_report
from ..trainer import Trainer

_MOST_COLUMNS: Final = 48
"""Of a cell in a table; longer ones go on in the next line."""

_LIMIT: Final = 120
"""Seconds that all checks of the doctor may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns what the process is to exit with."""
    end_quietly()  # whoever reads the output may have read enough
    parser, given = _parser(), list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options, others = parser.parse_known_args(given[:end])
    others += given[end + 1 :]
    if options.command is None:
        parser.print_help()
        return 2
    if options.command is _plan:
        options.arguments = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        return options.command(options) or 0
    except BrokenPipeError:
        return 141  # 128 + SIGPIPE, as other programs do
    except (OSError, ValueError, ImportError) as error:
        if os.environ.get("JAXDP_TRACEBACK"):
            raise
        print(f"jaxdp: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxdp",
        description="Train Equinox models on one or many devices.",
        epilog="`jaxdp COMMAND --help` says more about a command.",
    )
    version = versions().get("jaxdp", "unknown")
    parser.add_argument("--version", action="version", version=f"jaxdp {version}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(command: Callable[..., Any], help: str, **more: Any) -> Callable[..., Any]:
        name = command.__name__.removeprefix("_")
        description = inspect.getdoc(command)
        added = commands.add_parser(name, help=help, description=description, **more)
        added.set_defaults(command=command)
        return added.add_argument

    # One command after the other.
    add(_doctor, "say whether JAX computes right here, and what to do if not")

    option = add(
        _plan,
        "show what a script's training will need, without training",
        usage="%(prog)s [options] SCRIPT [the script's own arguments]",
        allow_abbrev=False,
    )
    option("script", metavar="SCRIPT", help="a Python file that calls `Trainer.fit`")
    for name, kind, metavar, help in (
        ("--devices", int, "N", "for this many devices, whatever this machine has"),
        ("--hosts", int, "N", "on so many hosts, in equal parts"),
        (
            "--topology",
            str,
            "NAME",
            "for hardware that you do not have: h100x64, v5p-2048, ...",
        ),
        ("--hardware", str, "NAME", "the hardware to estimate time for: h100, ..."),
        ("--json", str, "FILE", "write the plan as JSON too"),
    ):
        option(name, type=kind, metavar=metavar, help=help)

    option = add(_report, "write one HTML page about a run")
    option("run", help="the folder of the run, or its metrics.csv")
    option("-o", "--output", help="the file; report.html in the run by default")

    option = add(_compare, "put several runs side by side")
    option("runs", nargs="+", help="folders of runs, or metrics.csv files")
    option("-o", "--output", help="write an HTML page too, with curves")

    option = add(_export, "write the weights of a checkpoint into one file")
    option("checkpoint", help="the folder of a checkpoint, or of several")
    option("output", help="ends with .safetensors or .npz")
    which = "those that were validated, an average say, or those of training"
    option("--which", choices=("scored", "raw"), default="scored", help=which)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    """Looks for devices, and compares what they compute with NumPy.

    Every line is ok, a hint, or a problem with a remedy. The exit code is 1 when there
    is a problem.
    """
    lines = _examined()
    print(*lines, sep="\n", flush=True)
    return int(any(line.startswith("PROBLEM") for line in lines))


def _plan(options: argparse.Namespace) -> None:
    """Runs SCRIPT up to its first `fit` (or `steps`), and plans instead.

    Told are memory, communication, operations and time of a train step. What the script
    does before, it does. The options below may stand before or after SCRIPT; all others
    are handed to it, and so is whatever comes after `--`.
    """
    path = options.json
    folder = os.path.dirname(os.path.abspath(path or __file__))
    if path and (os.path.isdir(path) or not os.access(folder, os.W_OK)):
        raise ValueError(
            f"`--json`: {path} can't be written; pass a file in an existing folder that"
            " can be written to."
        )
    names = "devices", "hosts", "topology", "hardware"
    wanted = {name: getattr(options, name) for name in names}
    plan = _plan_script(options.script, options.arguments, **wanted)
    print(plan)
    if options.json:
        Path(options.json).write_text(json.dumps(plan.to_dict(), indent=2))


def _report(options: argparse.Namespace) -> None:
    """Writes one HTML page, which opens offline, about a run that `CSVLogger` logged.

    Its curves need matplotlib.
    """
    run, path = read_run(options.run), Path(options.run)
    folder = path if path.is_dir() else path.parent
    print(write_report(run, options.output or folder / "report.html"))


def _compare(options: argparse.Namespace) -> None:
    """Prints the results of several runs and what differs between them.

    The best of a row is marked with *.
    """
    runs = [read_run(path) for path in options.runs]
    _print_table(comparison(runs))
    differing = differences(runs)
    if len(differing) > 1:
        print("\nwhat differs")
        _print_table(differing)
    if options.output:
        print(f"\n{write_comparison(runs, options.output)}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    wrapped = [
        line
        for row in rows
        for line in itertools.zip_longest(
            *(textwrap.wrap(cell, _MOST_COLUMNS) or [""] for cell in row), fillvalue=""
        )
    ]
    print("\n".join(columns(wrapped)))


def _export(options: argparse.Namespace) -> None:
    """Writes the model's arrays of a checkpoint into one file, by their paths.

    `jaxdp.load_model` and other programs read .safetensors; NumPy reads .npz.
    """
    path = Path(os.path.abspath(options.output))
    if path.suffix not in (".safetensors", ".npz"):
        raise ValueError(f"`{options.output}` must end with .safetensors or .npz.")
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(array)
        for name, array in read_weights(options.checkpoint, options.which).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        if path.suffix == ".npz":
            with temporary.open("wb") as file:
                np.savez(file, **arrays)
        else:
            who = "a .safetensors file"
            safetensors = import_extra("safetensors.numpy", who, "safetensors")
            safetensors.save_file(arrays, temporary)
    count = sum(array.size for array in arrays.values())
    print(f"{path}: {len(arrays)} arrays, {count:,} numbers")


class _Planned(BaseException):
    """Leaves the script from inside of `fit`. No `except Exception` stops it."""

    def __init__(self, plan: Any):
        self.plan = plan


def _plan_script(script: str, arguments: Sequence[str], **options: Any) -> Any:
    """The plan of the first `fit` (or `steps`) that a script comes to.

    Args:
        script: its path.
        arguments: for the script.
        options: for `Trainer.plan`.
    """
    if not os.path.isfile(script):
        raise FileNotFoundError(f"`{script}`: there is no such file.")

    def plan(trainer: Trainer, train_loader: Any) -> NoReturn:
        raise _Planned(trainer.plan(train_loader, **options))

    # The script runs as ever, up to its first `fit`.
    argv, path, code = sys.argv, list(sys.path), None
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        with instead_of_training(plan):
            runpy.run_path(script, run_name="__main__")
    except _Planned as planned:
        return planned.plan
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv, sys.path[:] = argv, path
    raise ValueError(
        f"{script} ended{f' with exit code {code}' if code else ''} without a call of"
        " `Trainer.fit` or `Trainer.steps`, so there is nothing to plan. (It ran as a"
        f" main program, with these arguments: {list(arguments)}.)"
    )


# The doctor.


class Finding(NamedTuple):
    """What a check finds."""

    state: str
    """"ok", "hint" or "PROBLEM"."""
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n          -> {self.remedy}" if self.remedy else ""
        return f"{self.state:7}  {self.what}{remedy}"


def _examined() -> list[str]:
    """Versions, and what a process of its own finds, which may hang or abort."""
    lines = [str(Finding("ok", ", ".join(map(" ".join, versions().items()))))]
    try:
        command = [sys.executable, "-c", f"from {__name__} import check; check()"]
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT)
        output, error, code = done.stdout, done.stderr, done.returncode
        why = f"it ended with exit code {code}"
    except subprocess.TimeoutExpired as late:
        output, error, code = late.stdout or b"", b"", 1
        why = f"no answer within {_LIMIT} seconds"

    doing = "jaxdp"
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("# "):
            doing = line[2:]
        else:
            lines.append(line)
    if code:
        told = error.decode(errors="replace").strip().splitlines() or [why]
        flags = [line for line in told if "XLA_FLAGS" in line]
        text = f"{doing} failed: {(flags or told)[-1][:300]}"
        lines.append(str(Finding("PROBLEM", text, "try JAX_PLATFORMS=cpu")))
    return lines


def check() -> None:
    """Prints what the doctor finds, and before it the name of what is tried."""
    for finding in findings(lambda name: print(f"# {name}", flush=True)):
        print(finding, flush=True)


def findings(begins: Callable[[str], Any] = str) -> Iterator[Finding]:
    """What each check finds, in this process; `begins` is told its name before."""
    for name, function in _CHECKS.items():
        begins(name)
        try:
            yield from function()
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}"
            yield Finding("PROBLEM", text[:500])


def _devices() -> Iterator[Finding]:
    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    yield Finding("ok", f"{len(devices)} x {kind} ({platform})")
    version = devices[0].client.platform_version.strip().replace("\n", ", ")
    if platform != "cpu":
        yield Finding("ok", f"driver and libraries: {version}{_libraries()}")
        if note := note_on_kinds(devices):
            yield Finding("hint", note)

    # What the system shows, whether or not JAX can use it.
    places = {"NVIDIA GPU": "nvidia[0-9]*", "TPU": "accel*", "AMD GPU": "kfd"}
    seen = [name for name, place in places.items() if glob.glob(f"/dev/{place}")]
    if seen and platform == "cpu":
        remedy = "install JAX for it: see docs/install.md"
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            remedy = "unset JAX_PLATFORMS, which is 'cpu'"
        yield Finding(
            "PROBLEM", f"there is a {seen[0]}, and JAX does not use it", remedy
        )


def _libraries() -> str:
    """The versions of CUDA's libraries that JAX has loaded, where it tells them."""
    try:
        import jax._src.lib

        told: Any = jax._src.lib.cuda_versions
        driver, cudnn = told.cuda_driver_get_version(), told.cudnn_get_version()
    except Exception:  # not with this version, or not NVIDIA's
        return ""
    return f", driver for CUDA {driver // 1000}.{driver % 1000 // 10}, cuDNN {cudnn}"


def _arithmetic() -> Iterator[Finding]:
    # Of integers so small that no precision rounds them.
    a, b = np.random.default_rng(0).integers(-8, 8, (2, 256, 256)).astype(np.float32)
    yield _same("a product agrees with NumPy's", jax.jit(jnp.matmul)(a, b), a @ b)
    yield _same("ones(4) + 1 is 2", jnp.ones(4) + 1, np.full(4, 2.0))
    drawn = jax.random.normal(jax.random.key(0), (10_000,))
    yield _same("random numbers are finite", jnp.isfinite(drawn).all(), True)


def _donated() -> Iterator[Finding]:
    for swapped in False, True:

        def step(a: Any, b: Any, swapped: bool = swapped) -> Any:
            return (b * 3, a + 1) if swapped else (a + 1, b * 3)

        a, b = jnp.arange(1024.0), jnp.ones(1024)
        expected = step(np.arange(1024.0), np.ones(1024))
        donated = jax.jit(step, donate_argnums=(0, 1))(a, b)
        what = f"donated arrays are overwritten rightly{', swapped' * swapped}"
        yield _same(what, jnp.stack(donated), np.stack(expected))


def _scatter() -> Iterator[Finding]:
    rows = np.random.default_rng(0).integers(0, 399, 40_960)
    add = jax.jit(lambda rows: jnp.zeros((399, 64)).at[rows].add(1.0))
    counts = np.bincount(rows, minlength=399)[:, None] * np.ones(64)
    yield _same("a scatter-add is right", add(rows), counts)
    started = time.perf_counter()
    add(rows).block_until_ready()  # waits for the device
    seconds = time.perf_counter() - started
    yield Finding("ok", f"a scatter-add of 40,960 rows takes {1000 * seconds:.1f} ms")
    if seconds > 0.5:  # it goes row by row
        yield Finding("hint", "embeddings are slow to train", "try another jaxlib")


def _precision() -> Iterator[Finding]:
    value, one = 1 + 2.0**-12, jnp.eye(256)
    for precision in None, "float32":
        with jax.default_matmul_precision(precision):
            product = jax.jit(jnp.matmul)(one * value, one)
        is_exact = float(product[0, 0]) == value  # waits for the device
        how = "computed in float32" if is_exact else "rounded (to TF32, bfloat16)"
        if precision is None:
            yield Finding("ok", f"products of float32 arrays are {how} by default")
        else:
            yield _same('they are in float32 under precision="32-highest"', is_exact, 1)


def _pinned() -> Iterator[Finding]:
    there = jnp.arange(1024.0)
    away = jax.device_put(there, there.sharding.with_memory_kind(HOST))
    back = jax.device_put(away, there.sharding)
    yield _same(f"arrays go to {HOST} memory and back", back, np.arange(1024.0))


def _same(what: str, found: Any, expected: Any) -> Finding:
    if np.array_equal(np.asarray(found), expected):  # waits for the device
        return Finding("ok", what)
    remedy = "wrong numbers: try another version of JAX, or another driver"
    return Finding("PROBLEM", f"not so: {what}", remedy)


_CHECKS: Final[dict[str, Callable[[], Iterator[Finding]]]] = {
    "looking for devices": _devices,
    "arithmetic": _arithmetic,
    "donation": _donated,
    "a scatter-add": _scatter,
    "precision": _precision,
    "pinned memory": _pinned,
}
