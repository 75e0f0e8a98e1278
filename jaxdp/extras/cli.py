"""The command line: `python -m jaxdp doctor | plan | report | compare | export`."""

import argparse
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..basics.console import format_columns
from ..basics.environment import get_versions
from ..basics.files import write_atomically
from ..fit import replace_training
from ..trainer import Trainer
from .doctor import examine
from .model_files import read_weights, write_arrays
from .reports import (
    compare_runs,
    read_run,
    tabulate_differences,
    write_report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code of the process."""
    parser = _make_parser()
    args = list(sys.argv[1:] if arguments is None else arguments)
    end = args.index("--") if "--" in args else len(args)
    options, others = parser.parse_known_args(args[:end])
    options.arguments = others + args[end + 1 :]
    if options.command is None:
        parser.print_help()
        return 2
    if options.arguments and options.command is not _plan:
        parser.error(f"unrecognized arguments: {' '.join(options.arguments)}")
    try:
        return options.command(options) or 0
    except (OSError, ValueError, ImportError) as error:
        if os.environ.get("JAXDP_TRACEBACK"):
            raise
        print(f"jaxdp: {error}", file=sys.stderr)
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jaxdp", epilog="`jaxdp COMMAND --help` says more about a command."
    )
    version = get_versions().get("jaxdp", "unknown")
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
    option("--devices", type=int, help="for this many devices, here or not")
    option("--hosts", type=int, help="on so many hosts, in equal parts")
    option("--topology", help="for hardware that is not here: h100x64, v5p-2048, ...")
    option("--hardware", help="the hardware to estimate time for: h100, ...")
    option("--json", type=Path, metavar="FILE", help="write the plan as JSON too")

    option = add(_report, "write one HTML page about a run")
    option("run", type=Path, help="the folder of the run, or its metrics.csv")
    option("-o", "--output", help="the file; report.html in the run by default")

    option = add(_compare, "put several runs side by side")
    option("runs", nargs="+", help="folders of runs, or metrics.csv files")

    option = add(_export, "write the weights of a checkpoint into one file")
    option("checkpoint", help="the folder of a checkpoint, or of several")
    option("output", type=Path, help="ends with .safetensors or .npz")
    which = "those that were validated, an average say, or those of training"
    option("--which", choices=("scored", "raw"), default="scored", help=which)
    return parser


def _doctor(_: argparse.Namespace) -> int:
    """Looks for devices, and compares what they compute with NumPy.

    Every line is ok, a hint, or a problem with a remedy. The exit code is 1 when there
    is a problem.
    """
    return int(not examine())


class _PlanDone(BaseException):
    """Leaves a script from inside of `fit`. No `except Exception` stops it."""


def _plan(options: argparse.Namespace) -> None:
    """Runs SCRIPT up to its first `fit` (or `steps`), and plans instead.

    It prints the memory, communication, operations and time of a train step. What the
    script does before its first `fit` happens. The options below may stand before or
    after SCRIPT; all others, and all after `--`, are passed to the script.
    """
    script, plans = options.script, []
    if not os.path.isfile(script):
        raise FileNotFoundError(f"`{script}`: there is no such file.")

    def plan(trainer: Trainer, train_loader: Any) -> NoReturn:
        names = "devices", "topology", "hardware", "hosts"
        chosen = {name: getattr(options, name) for name in names}
        plans.append(trainer.plan(train_loader, **chosen))
        raise _PlanDone

    # The script runs as usual, up to its first `fit`.
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        with replace_training(plan):
            runpy.run_path(script, run_name="__main__")
    except _PlanDone:
        print(plans[0])
    except SystemExit as error:
        if error.code:  # the script says why
            raise
    finally:
        sys.argv, sys.path[:] = argv, path
    if not plans:
        raise ValueError(
            f"{script} ended without a call of `Trainer.fit` or `Trainer.steps`, so"
            " there is nothing to plan. (It ran as a main program, with these"
            f" arguments: {options.arguments}.)"
        )
    if options.json:
        options.json.write_text(json.dumps(plans[0].to_dict(), indent=2))


def _report(options: argparse.Namespace) -> None:
    """Writes one HTML page, which opens offline, about a run that `CSVLogger` logged.

    Its curves need matplotlib.
    """
    folder = options.run if options.run.is_dir() else options.run.parent
    page = options.output or folder / "report.html"
    print(write_report(read_run(options.run), page))


def _compare(options: argparse.Namespace) -> None:
    """Prints the results of several runs and what differs between them.

    The best of a row is marked with *.
    """
    runs = [read_run(path) for path in options.runs]
    print("\n".join(format_columns(compare_runs(runs))))
    differing = tabulate_differences(runs)
    if len(differing) > 1:
        print("\nwhat differs", *format_columns(differing), sep="\n")


def _export(options: argparse.Namespace) -> None:
    """Writes the model's arrays of a checkpoint into one file, by their paths.

    `jaxdp.load_model` and other programs read .safetensors; NumPy reads .npz.
    """
    path = options.output.absolute()
    if path.suffix not in (".safetensors", ".npz"):
        raise ValueError(f"`{options.output}` must end with .safetensors or .npz.")
    arrays: Any = read_weights(options.checkpoint, options.which)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".npz":
            np.savez(file, **arrays)
        else:
            write_arrays(temporary, arrays)
    count = sum(array.size for array in arrays.values())
    print(f"{path}: {len(arrays)} arrays, {count:,} numbers")
