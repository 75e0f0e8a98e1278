"""The checks of `python -m jaxdp doctor`."""

from collections.abc import Iterator
from typing import Any

from jaxdp.basics.hardware import get_product_precision
from jaxdp.extras.doctor import CHECKS, run_check
from jaxdp.extras.plan import hardware_of


def measure(toy: bool) -> dict[str, Any]:
    """Returns the lines of all checks, and the properties of the device."""
    import jax

    device = jax.devices()[0]
    profile = hardware_of(device)
    return {
        "findings": [line for name in CHECKS for line in run_check(name)],
        "memory": device.memory_stats(),
        "profile": profile and profile._asdict(),
        "float32_by_default": get_product_precision(device),
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a row for each line of the checks."""
    for line in found["findings"]:
        state, text = line.partition("\n")[0].split(maxsplit=1)
        yield state, text
    name = found["profile"]["name"] if found["profile"] else "not known"
    yield "its profile", f"{name}; float32 products in {found['float32_by_default']}"
