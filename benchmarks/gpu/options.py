"""Options of XLA: as it is, at the effort level O1, without command buffers."""

from collections.abc import Iterator
from typing import Any, Final

from . import steps

OPTIONS: Final = {
    "default": None,
    "O1": "O1",
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
}
CASES: Final = "tiny", "lenet", "gpt-1024"


def measure(toy: bool) -> dict[str, Any]:
    """Milliseconds of a step, by case and options."""
    found: dict[str, Any] = {}
    for name in CASES[:1] if toy else CASES:
        case = steps.cases(toy)[name]
        found[case.title] = {}
        for title, options in OPTIONS.items():
            try:
                run, *_ = steps.ours(case, ready=True, compiler_options=options)
                run(1)
                short, long = run(1), run(1 + case.epochs)
                each = (long - short) / (case.epochs * len(case.batches()))
                is_lost = steps.is_too_short(short, long)
                found[case.title][title] = (
                    "too short to time" if is_lost else 1e3 * each
                )
            except Exception as error:  # this version may not know the option
                found[case.title][title] = f"{type(error).__name__}: {error}"[:200]
    return found


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each case and options."""
    for case, by_options in found.items():
        for name, value in by_options.items():
            is_time = isinstance(value, float)
            yield f"{case}: {name}", f"{value:.4g} ms a step" if is_time else value
