"""Names are verbs and nouns of the field, and docstrings begin with what a thing is."""

import ast
import collections
import io
import pathlib
import re
import tokenize

import pytest

import jaxdp

PACKAGE = pathlib.Path(jaxdp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

NOT_VERBS = set(
    "taken given kept held told made drawn shown found left put_back of on by at in for"
    " with without into like as_if together apart here there own".split()
)
"""First words that say nothing of what a function does."""

VERBS_IN_ED = {"need", "feed", "embed", "string", "seed", "shed", "exceed", "speed"}

PUBLIC = "a public name, in scripts of others"
SEAM = "a member that other people's strategies, optimizers or models define"
ALLOWED_FUNCTIONS = {
    "averaged_model": PUBLIC,
    "compiled_facts": PUBLIC,
    "compiled_train_step": PUBLIC,
    "evaluated_params": SEAM,
    "evaluated_state": SEAM,
    "like_gradients": SEAM,
    "on": SEAM,
    "running_plan": PUBLIC,
    "scaling": "the noun for how a plan grows with devices; public",
    "stored_path": "a converter of key paths, beside `leaf_path`",
    "with_callbacks": "returns a copy of a named tuple with another field",
}
"""Functions whose names the rule takes for something else, each with the reason. The
rule can't tell whether a name is a good one."""

ALLOWED_CLASSES = {
    "Feed": "a noun",
    "Preempted": PUBLIC,
    "Scaling": PUBLIC,
    "Sharded": PUBLIC,
}

ALLOWED_TWICE = {"start_saving"}
"""`Trainer.start_saving` of a run, and that of any state beneath it."""

UNWANTED = re.compile(
    r"\b(meetings?|guests?|wish(es)?|beats?|told|tells|hears|excuses?|whoever|somebody"
    r"|those who|nobody)\b",
    re.IGNORECASE,
)

BEGINNINGS = r"(What|How|Where|Whether|As|Those|That|Who)\b"
"""First words of docstrings that are clauses; a property may begin with "Whether"."""


def functions():
    """Each function that the rule is for: a file and its node."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            is_property = any("property" in mark or ".setter" in mark for mark in marks)
            if not is_property and not node.name.startswith(("on_", "__")):
                yield path.relative_to(PACKAGE), node


def test_functions_are_named_by_verbs():
    wrong = set()
    for path, node in functions():
        first = node.name.strip("_").split("_")[0]
        is_odd = first.endswith(("ed", "ing")) and first not in VERBS_IN_ED
        if is_odd or first in NOT_VERBS:
            wrong.add(f"{path}: {node.name}")
    names = {line.split(": ")[1] for line in wrong}
    assert names == {*ALLOWED_FUNCTIONS}, "\n".join(sorted(wrong))


def test_classes_are_named_by_nouns():
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                words = re.findall(r"[A-Z][a-z]+", node.name)
                if len(words) == 1 and words[0].endswith(("ed", "ing", "en")):
                    wrong.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert {line.split(": ")[1] for line in wrong} == {*ALLOWED_CLASSES}


def texts(path):
    """The docstrings and comments of a file, with their lines."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_docstrings_and_comments_name_their_subjects(path):
    wrong = []
    for line, text in texts(path):
        if text.startswith(("What ", "Whoever ", "Who ")):
            wrong.append(f"{path.name}:{line}: begins with {text[:40]!r}")
        for found in UNWANTED.finditer(text):
            wrong.append(f"{path.name}:{line}: {found[0]!r} in {text[:40]!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["jaxdp", "tests", "benchmarks", "examples"])
def test_docstrings_begin_with_their_nouns_or_verbs(package):
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    wrong = []
    for path in sorted((pathlib.Path(__file__).parents[1] / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = isinstance(node, kinds) and ast.get_docstring(node)
            marks = map(ast.unparse, getattr(node, "decorator_list", []))
            if text and (first := re.match(BEGINNINGS, text)):
                if first[0] != "Whether" or not any("property" in m for m in marks):
                    wrong.append(f"{path.name}:{getattr(node, 'lineno', 1)}: {text}")
    assert not wrong, "\n".join(wrong)


def test_one_name_means_one_function():
    """Functions of one name in different packages have the same parameters."""
    homes = collections.defaultdict(dict)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                package = path.relative_to(PACKAGE).parts[0]
                homes[node.name][package] = ast.unparse(node.args)
    wrong = {name: where for name, where in homes.items() if len({*where.values()}) > 1}
    assert {*wrong} == ALLOWED_TWICE, wrong
