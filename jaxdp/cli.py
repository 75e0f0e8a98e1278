"""The command line: `python -m jaxdp doctor | plan | report | compare | export`."""

import argparse
import contextlib
import itertools
import json
import os
import runpy
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .basics.environment import versions
from .trainer import Trainer

_MOST_COLUMNS = 48
"""Of a cell in a table; longer ones go on in the next line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns what the process is to exit with."""
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
    except (FileNotFoundError, ValueError, ImportError, _Stopped) as error:
        if os.environ.get("JAXDP_TRACEBACK"):
            raise
        print(f"jaxdp: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdp",
        description="Train Equinox models on one or many devices.",
        epilog="`python -m jaxdp COMMAND --help` says more about a command.",
    )
    version = versions().get("jaxdp", "unknown")
    parser.add_argument("--version", action="version", version=f"jaxdp {version}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        help="say what works here, and what to do about the rest",
        description="Tries what training needs: devices, data workers, several"
        " processes, checkpoints. Every line is ok, a hint, or a problem with a remedy."
        " The exit code is 1 when there is a problem.",
    )
    doctor.add_argument(
        "--quick", action="store_true", help="leave out what takes seconds to try"
    )
    doctor.set_defaults(command=_doctor)

    plan = commands.add_parser(
        "plan",
        help="say what a script's training will take, without training",
        description="Runs SCRIPT up to its first `fit` (or `steps`), and plans instead:"
        " memory, communication, operations and time of a train step. What the script"
        " does before, it does. The options below may stand before or after SCRIPT;"
        " all others are handed to it, and so is whatever comes after `--`.",
        usage="%(prog)s [options] SCRIPT [the script's own arguments]",
        allow_abbrev=False,
    )
    plan.add_argument(
        "script", metavar="SCRIPT", help="a Python file that calls `Trainer.fit`"
    )
    plan.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="for so many devices; none need be here",
    )
    plan.add_argument(
        "--hosts", type=int, metavar="N", help="on so many hosts, in equal parts"
    )
    plan.add_argument(
        "--topology",
        metavar="NAME",
        help="for hardware that is not here: h100x64, v5p-2048, ...",
    )
    plan.add_argument(
        "--hardware",
        metavar="NAME",
        help="whose peaks to estimate time with: h100, ...",
    )
    plan.add_argument("--html", metavar="FILE", help="write the plan as a page too")
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON too")
    plan.set_defaults(command=_plan)

    report = commands.add_parser(
        "report",
        help="write one HTML page about a run",
        description="Writes one HTML page, which opens offline, about a run that"
        " `CSVLogger` logged.",
    )
    report.add_argument("run", help="the folder of the run, or its metrics.csv")
    report.add_argument(
        *("-o", "--output"), help="the file to write; report.html in the run by default"
    )
    report.set_defaults(command=_report)

    compare = commands.add_parser(
        "compare",
        help="put several runs side by side",
        description="Prints the results of several runs and what differs between them."
        " The best of a row is marked with *.",
    )
    compare.add_argument(
        "runs", nargs="+", help="folders of runs, or metrics.csv files"
    )
    compare.add_argument(
        *("-o", "--output"), help="write an HTML page too, with curves"
    )
    compare.set_defaults(command=_compare)

    export = commands.add_parser(
        "export",
        help="write the weights of a checkpoint into one file",
        description="Writes the model's arrays of a checkpoint into one file, by their"
        " paths in the model (`layers[0].weight`). `jaxdp.load_model` and other"
        " programs read .safetensors; NumPy reads .npz.",
    )
    export.add_argument("checkpoint", help="the folder of a checkpoint")
    export.add_argument("output", help="ends with .safetensors or .npz")
    export.set_defaults(command=_export)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import examine

    problems = 0
    for finding in examine(quick=options.quick):
        print(finding, flush=True)
        problems += finding.state == "problem"
    return 1 if problems else 0


def _plan(options: argparse.Namespace) -> None:
    wanted = {
        "devices": options.devices,
        "hosts": options.hosts,
        "topology": options.topology,
        "hardware": options.hardware,
    }
    plan = plan_script(options.script, options.arguments, **wanted)
    print(plan)
    if options.html:
        plan.to_html(options.html)
        print(f"\nwritten to {options.html}")
    if options.json:
        Path(options.json).write_text(json.dumps(plan.to_dict(), indent=2))


def plan_script(script: str, arguments: Sequence[str], **options: Any) -> Any:
    """The plan of the first `fit` (or `steps`) that a script comes to.

    Args:
        script: its path.
        arguments: for the script.
        options: for `Trainer.plan`.
    """
    if not os.path.isfile(script):
        raise FileNotFoundError(f"`{script}`: there is no such file.")
    with _as_main(script, arguments), _planning(options):
        try:
            runpy.run_path(script, run_name="__main__")
        except _Planned as planned:
            return planned.plan
        except SystemExit as error:
            if error.code:
                raise _Stopped(
                    f"{script} ended with exit code {error.code} before its `fit`."
                ) from error
    raise _Stopped(
        f"{script} ended without a call of `Trainer.fit` or `Trainer.steps`, so there"
        " is nothing to plan. (It ran as a main program, with these arguments:"
        f" {list(arguments)}.)"
    )


class _Planned(BaseException):
    """Leaves the script from inside of `fit`. No `except Exception` stops it."""

    def __init__(self, plan: Any):
        self.plan = plan


class _Stopped(Exception):
    """A script ended where it should not."""


@contextlib.contextmanager
def _planning(options: dict[str, Any]) -> Iterator[None]:
    """While inside, trainers plan where they would train."""

    def plan(trainer: Trainer, train_loader: Any, *_: Any, **__: Any) -> Any:
        raise _Planned(trainer.plan(train_loader, **options))

    real = {name: getattr(Trainer, name) for name in ("fit", "steps")}
    for name in real:
        setattr(Trainer, name, plan)
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(Trainer, name, method)


@contextlib.contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as when the script is started itself."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _report(options: argparse.Namespace) -> None:
    from .reports import read_run, write_report

    run = read_run(options.run)
    folder = (
        Path(options.run) if os.path.isdir(options.run) else Path(options.run).parent
    )
    print(write_report(run, options.output or folder / "report.html"))


def _compare(options: argparse.Namespace) -> None:
    from .reports import comparison, differences, read_run, write_comparison

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
    widths = [max(map(len, column)) for column in zip(*wrapped, strict=True)]
    for row in wrapped:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())


def _export(options: argparse.Namespace) -> None:
    import numpy as np

    from .checkpoint.weights import read_weights

    path = os.path.abspath(options.output)
    suffix = os.path.splitext(path)[1]
    if suffix not in (".safetensors", ".npz"):
        raise ValueError(f"`{options.output}` must end with .safetensors or .npz.")
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(array)
        for name, array in read_weights(options.checkpoint).items()
    }
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path.removesuffix(suffix)}.{os.getpid()}.tmp{suffix}"
    try:
        if suffix == ".npz":
            np.savez(temporary, **arrays)
        else:
            _safetensors().save_file(arrays, temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    count = sum(array.size for array in arrays.values())
    print(f"{path}: {len(arrays)} arrays, {count:,} numbers")


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "a .safetensors file needs safetensors, which is not installed; run"
            ' `pip install "jaxdp[safetensors]"`, or export to .npz.'
        ) from error
    return safetensors.numpy
