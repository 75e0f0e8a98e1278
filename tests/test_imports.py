"""Arrows between packages go down only, and heavy packages wait until needed."""

import ast
import inspect
import io
import pathlib
import re
import sys

import numpy as np
import pytest
from toys import batches, linear_on_one_device, run_python

import jaxdp
from jaxdp.callbacks import ProgressBar

PACKAGE = pathlib.Path(jaxdp.__file__).parent

LAYERS = """
__main__ __init__
testing extras
trainer
fit
callbacks
record
history
engine
data strategies checkpoint
step distributed
losses
basics
"""
"""Each package imports from the lines below its own, and from nothing beside it."""


def imports(path):
    """Yields the package imports anywhere in a file, as parts of dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            inside = path.relative_to(PACKAGE).parts[: -node.level]
            named = (node.module or "").split(".") if node.module else []
            yield from ((*inside, *named, alias.name) for alias in node.names)


def arrows():
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        for target in imports(path):
            yield relative, relative.with_suffix("").parts[0], target[0]


def test_packages_import_only_what_is_below_them():
    lines = enumerate(LAYERS.strip().splitlines())
    level = {name: number for number, line in lines for name in line.split()}
    assert not [
        f"{path}: {package} -> {other}"
        for path, package, other in arrows()
        if package != other and level[package] >= level[other]
    ]


EXTRAS = {"testing", "extras"}
"""What stands above the Trainer, and is named in a table of `jaxdp/__init__.py`."""

STRATEGIES = {"Bitwise", "LocalSGD", "Members", "Pipeline"}
"""Those of them that are strategies: nothing else knows of these classes."""


def test_no_file_of_the_core_names_an_extra():
    named = []
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        parts = {relative.stem, *relative.parts[:-1]}
        if parts & (EXTRAS | {"__init__", "__main__"}):
            continue
        for target in imports(path):
            if target[0] in EXTRAS:
                named.append(f"{relative} imports {'.'.join(target)}")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and node.id in STRATEGIES:
                named.append(f"{relative}:{node.lineno} names {node.id}")
    assert not named


def test_what_users_are_told_goes_through_the_console():
    # Elsewhere a pipe that nobody reads would end the run.
    for path in PACKAGE.rglob("*.py"):
        if path.name != "console.py" and path.name != "cli.py":
            text = path.read_text()
            assert "warnings.warn(" not in text, path
            assert "file=sys.stderr" not in text, path


def test_what_waits_until_it_is_asked_for_is_there():
    for module in (jaxdp, jaxdp.callbacks, jaxdp.plan):
        assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Something'"):
        jaxdp.callbacks.Something  # noqa: B018


@pytest.mark.parametrize("line, answer", [
    (
        "from jaxdp import EarlyStopping",
        "from jaxdp.callbacks import EarlyStopping",
    ),
    ("from jaxdp import mse", "from jaxdp.losses import mse"),
    ("from jaxdp import LightningModule", r"jaxdp.Trainer\(model"),
    ("from jaxdp.callbacks import TerminateOnNaN", "NanGuard"),
    ("from jaxdp.callbacks import EarlyStoping", "callbacks.EarlyStopping may be"),
    ("from jaxdp import optax", "cannot import name 'optax'"),
])  # fmt: skip
def test_names_of_elsewhere_say_where_they_are(line, answer):
    with pytest.raises(ImportError, match=answer):
        exec(line)


def test_names_are_listed():
    for module in (jaxdp, jaxdp.callbacks, jaxdp.strategies):
        assert {*module.__all__} <= {*dir(module)}


IMPORT = """
import logging, os, signal, sys, threading, warnings
import equinox, jax, numpy, optax

def settings():
    return {
        "JAX": dict(jax.config.values),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(n)) for n in signal.valid_signals()],
        "hooks": [sys.excepthook, threading.excepthook, warnings.showwarning],
        "warnings": list(warnings.filters),
        "logging": [list(logging.root.handlers), logging.root.level],
        "threads": threading.enumerate(),
        "random": numpy.random.get_state()[1].tolist(),
        "devices": list(jax._src.xla_bridge._backends),
    }

before = settings()
import jaxdp
heavy = ("torch", "orbax", "tqdm", "matplotlib", "tensorboard", "wandb", "mlflow")
print([name for name in heavy if name in sys.modules])
print([name for name, value in settings().items() if value != before[name]])
"""


def test_heavy_packages_are_not_imported_and_nothing_is_set_by_the_import(tmp_path):
    done = run_python(IMPORT, HOME=str(tmp_path), XDG_CACHE_HOME="")
    assert done.stdout.split() == ["[]", "[]"]
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


PATCHES = {"setattr", "delattr", "setitem", "delitem"}


def test_tests_patch_nothing_of_ours():
    """Patches stand for JAX, NumPy or the system; results show what we do."""
    patched = []
    for path in pathlib.Path(__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        ours = {"jaxdp"}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module.split(".")[0] == "jaxdp":
                    ours |= {alias.asname or alias.name for alias in node.names}
        for node in nodes:
            is_call = isinstance(node, ast.Call)
            if is_call and getattr(node.func, "attr", "") in PATCHES:
                (target,) = node.args[:1]
                if re.split(r"\W+", ast.unparse(target).strip("'"))[0] in ours:
                    patched.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        if ast.unparse(target.value).split(".")[0] in ours:
                            patched.append(f"{path.name}:{node.lineno}")
    assert not patched


def chains(node):
    """The names behind `trainer` wherever it is used: ("run", "engine", "held")."""
    parents = {
        child: parent
        for parent in ast.walk(node)
        for child in ast.iter_child_nodes(parent)
    }
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id == "trainer":
            chain, part = [], parents[name]
            while isinstance(part, ast.Attribute):
                chain.append(part.attr)
                part = parents[part]
            if chain:
                yield name.lineno, tuple(chain)


def test_callbacks_use_what_is_documented_and_reach_through_no_object_of_a_run():
    """`trainer.x`, and `trainer.record.x` and `trainer.run.x` of the reference."""
    page = (PACKAGE.parent / "docs" / "reference" / "record.md").read_text()
    documented = set(re.findall(r"^\| `(record|run)\.(\w+)", page, re.MULTILINE))
    trainer = linear_on_one_device()
    for part, of in (("record", type(trainer.record)), ("run", type(trainer.run))):
        attributes = inspect.cleandoc(of.__doc__)  # as Python 3.13 has it anyway
        for name in {name for owner, name in documented if owner == part}:
            assert hasattr(of, name) or f"\n    {name}: " in attributes, name
    wrong = []
    for path in (PACKAGE / "callbacks").glob("*.py"):
        for line, (first, *rest) in chains(ast.parse(path.read_text())):
            is_known = (
                first not in ("record", "run") or (first, *rest[:1]) in documented
            )
            if not is_known or (first == "run" and len(rest) > 1):
                wrong.append(f"{path.name}:{line}: trainer.{'.'.join((first, *rest))}")
    assert not wrong


SYNCS = re.compile(r"\bnp\.(as)?array\(|block_until_ready|\.item\(\)|float\(metrics\[")
HOT = {
    *("fit", "engine", "callbacks", "record.py", "step", "strategies"),
    *("bitwise.py", "local_sgd.py", "ensembles.py", "pipeline.py"),
    *("comparison.py", "finders.py"),
}


def test_every_wait_for_the_device_says_so():
    """By one phrase, so that a reader finds them all; what is on the host says that."""
    silent = []
    for path in PACKAGE.rglob("*.py"):
        if not {path.relative_to(PACKAGE).parts[0], path.name} & HOT:
            continue
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            said = "\n".join(lines[max(0, number - 2) : number + 1])
            if SYNCS.search(line) and "`" not in line and "mesh.devices" not in line:
                if "waits for the device" not in said and "# on the host" not in said:
                    silent.append(f"{path.name}:{number + 1}: {line.strip()}")
    assert not silent


CALLED_BY_CHECKS = "Metrics.__len__", "Metrics.__iter__"
MAX_CALLS_PER_STEP = 20
"""Functions of ours that a step calls: a small one takes as long as a hundred. Over
ready batches it is one less."""
MAX_CALLS_PER_EPOCH = {"ready batches": 69, "a DataLoader": 100}
"""Those that the end of an epoch and the start of the next call, with a bar."""


@pytest.mark.parametrize("kind", MAX_CALLS_PER_EPOCH)
def test_steps_and_ends_of_epochs_are_few_calls_of_ours(kind):
    def loader(count):
        data = batches(*[8] * count)
        if kind == "ready batches":
            return data
        torch = pytest.importorskip("torch")
        arrays = map(np.concatenate, zip(*data, strict=True))
        rows = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
        return torch.utils.data.DataLoader(rows, 8)

    def count_calls(steps, epochs, *callbacks):
        def profile(frame, event, _):
            is_ours = frame.f_code.co_filename.startswith(str(PACKAGE))
            name = frame.f_code.co_qualname
            # Of mappings, the checks of types in these tests call such methods.
            if is_ours and event == "call" and name not in CALLED_BY_CHECKS:
                calls.append(name)

        calls = []
        trainer = linear_on_one_device(*callbacks)
        trainer.fit(loader(steps))
        sys.setprofile(profile)
        try:
            trainer.fit(loader(steps), max_epochs=1 + epochs)
        finally:
            sys.setprofile(None)
        return len(calls)

    def count_per_epoch(steps):
        bar = ProgressBar(file=io.StringIO())
        return (count_calls(steps, 11, bar) - count_calls(steps, 1, bar)) / 10

    steps = (count_calls(128, 1) - count_calls(64, 1)) // 64
    assert steps <= MAX_CALLS_PER_STEP - (kind == "ready batches")
    between_epochs = 2 * count_per_epoch(4) - count_per_epoch(8)
    assert between_epochs <= MAX_CALLS_PER_EPOCH[kind]
