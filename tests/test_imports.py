"""Arrows between modules go down only, and heavy packages wait until needed."""

import ast
import pathlib
import subprocess
import sys

import pytest

import jaxdp

PACKAGE = pathlib.Path(jaxdp.__file__).parent
ORDER = [
    ["ambient_mesh", "arguments", "coordination", "files", "json_checks"],
    ["console", "device_compilers"],
    [
        "charts",
        "checkpoint_form",
        "collation",
        "collectives",
        "compilation_cache",
        "environment",
        "fingerprint",
        "flops",
        "generators",
        "hardware",
        "history",
        "hosts",
        "index_lists",
        "launchers",
        "losses",
        "metrics",
        "orbax_paths",
        "phases",
        "plan_page",
        "run_record",
        "seal",
        "tree",
        "undo",
    ],
    ["meetings", "hlo", "interaction", "callers", "python_calls"],
    ["processes"],
    [
        "block_size",
        "flat",
        "hyperparams",
        "interrupts",
        "layout",
        "lifeline",
        "objective",
        "precision",
        "plan_reading",
        "remat",
        "report",
        "own_generators",
        "sending",
        "stack",
    ],
    ["distributed", "cpu"],
    ["step"],
    ["checkpoint", "checkpoint_dir", "workers"],
    ["strategies", "callbacks", "weights", "own_state"],
    ["data"],
    ["portions", "checks", "compilations", "eager", "row_counts"],
    ["source", "programs"],
    ["engine"],
    ["torch_loader", "progress", "limits", "resume", "plan", "comparison"],
    ["loaders"],
    ["trainer"],
    ["testing", "doctor", "finders"],
    ["__init__", "cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def room(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path):
    """Rooms of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parent
            for _ in range(node.level - 1):
                base = base.parent
            names = [node.module] if node.module else [a.name for a in node.names]
            for name in names:
                target = base.joinpath(*name.split("."))
                yield room(target)


def test_every_module_imports_only_what_is_below_it():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in PACKAGE.rglob("*.py")
        for other in imports(path)
        if other != room(path) and LEVEL[other] >= LEVEL[room(path)]
    ]
    assert not wrong


def test_what_users_are_told_goes_through_the_console():
    # Elsewhere a pipe that nobody reads would end the run.
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("console.py", "cli.py"):
            text = path.read_text()
            assert "warnings.warn(" not in text, path
            assert "file=sys.stderr" not in text, path


def test_what_waits_until_it_is_asked_for_is_there():
    for module in (jaxdp, jaxdp.callbacks):
        assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'EarlyStoping'"):
        jaxdp.callbacks.EarlyStoping  # noqa: B018


def test_heavy_packages_are_not_imported_with_the_package():
    code = (
        "import sys, jaxdp; print([name for name in ('torch', 'orbax', 'tqdm',"
        " 'matplotlib', 'tensorboard', 'wandb', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
