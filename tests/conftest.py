"""Eight faked devices, checked types; tiny models and data."""

import collections
import functools
import gc
import logging
import os
import pathlib
import signal

# Before jax is imported: the tests are about many devices, on any machine.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jaxtyping
import pytest
from checked import checked

# Until all is imported there is no garbage to look for; see below.
gc.disable()

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Types are checked inside. Where users call in, wrong types get errors of our own,
# which tests want to see.
INSIDE = [
    "data.conversion",
    "data.padding",
    "data.targets",
    "engine.engine",
    "engine.flat_functions",
    "engine.compile_log",
    "step.metrics",
    "step.model_call",
    "step.objective",
    "step.precision",
    "engine.compiled_step",
    "engine.program",
    "step.remat",
    "step.mask_and_keys",
    "step.micro_batch",
    "step.train_state",
    "step.step_functions",
]

jaxtyping.jaxtyped = functools.partial(functools.partial, checked)
names = [f"jaxdp.{name}" for name in INSIDE]
with jaxtyping.install_import_hook(names, "beartype.beartype"):
    import jaxdp  # noqa: F401
    from jaxdp.basics.console import log_info_once


# What a shell starts with `&` ignores Ctrl-C, and under `nohup` SIGHUP; tests send
# both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is said goes to the root logger, where `caplog` listens.
logging.getLogger("jaxdp").propagate = True


@pytest.fixture(autouse=True)
def nothing_was_said():
    """Has each test see the messages that are logged once in a process."""
    log_info_once.cache_clear()


@pytest.fixture(scope="session")
def real_data():
    """The folder with real data sets, or a skip."""
    folder = os.environ.get("JAXDP_DATA_DIR")
    if not folder or not pathlib.Path(folder).is_dir():
        pytest.skip("JAXDP_DATA_DIR names no folder with data sets")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Has pytest-xdist send what was printed of folders that are not UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "bits: about the same bits, which CI guards whole"
    )
    config.addinivalue_line("markers", "kin: a slow case of a test that has quick ones")


def pytest_collection_finish(session):
    """Has the garbage collector pass over all that was imported, which stays.

    It looks seldom, too: JAX makes many objects, of which few are garbage, and to look
    at all of them took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


LONG = (
    "distributed",
    "faults",
    "test_process_settings",
    "test_examples",
    "test_docs",
    "test_twins",
    "data",
    # Both take many times as long in a process in which JAX has kept much.
    "test_in_use",
    "test_debug_settings",
)
"""What takes long comes first: at the end one process would wait for another."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the slow cases of tests, by `slow_cases` and `slow_but` with their ids.

    Others of the same test show the same promise in less time: these are its `kin`.
    """
    items.sort(key=lambda item: not any(part in item.nodeid for part in LONG))
    known = collections.defaultdict(set)
    for item in items:
        if hasattr(item, "callspec"):
            known[item.function].add(item.callspec.id)
    in_part = any("[" in argument for argument in config.args)
    for item in items:
        for mark in item.iter_markers():
            if mark.name not in ("slow_cases", "slow_but"):
                continue
            unknown = set(mark.args) - known[item.function]
            assert in_part or not unknown, f"{item.nodeid}: there are no {unknown}"
            if (item.callspec.id in mark.args) == (mark.name == "slow_cases"):
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.kin)
