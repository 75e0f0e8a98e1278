"""The checks of `python -m jaxdp doctor`, and the properties of the device."""

from collections.abc import Iterator
from typing import Any

import jax

from jaxdp.basics.hardware import get_product_precision
from jaxdp.extras.doctor import CHECKS, run_check
from jaxdp.extras.plan import hardware_of


def measure(toy: bool) -> Iterator[tuple[str, Any]]:
    """Yields the properties of the device, then the lines of each check."""
    device = jax.devices()[0]
    profile = hardware_of(device)
    yield "profile", profile and profile._asdict()
    yield "float32 products", get_product_precision(device)
    yield "memory", device.memory_stats()
    for name in CHECKS:
        yield f"check: {name}", [*run_check(name)]


def format_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a row for the device, and one for each line of the checks."""
    if "float32 products" in found:
        name = found["profile"]["name"] if found["profile"] else "not known"
        yield "its profile", f"{name}; float32 products in {found['float32 products']}"
    for check, lines in found.items():
        if check.startswith("check: "):
            for line in lines:
                state, text = line.partition("\n")[0].split(maxsplit=1)
                yield state, text
