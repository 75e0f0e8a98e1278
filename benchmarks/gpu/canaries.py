"""What `python -m jaxdp doctor` looks at."""

from collections.abc import Iterator
from typing import Any

from jaxdp.basics.hardware import get_product_precision
from jaxdp.extras.doctor import findings
from jaxdp.extras.plan import hardware_of


def measure(toy: bool) -> dict[str, Any]:
    """All findings, and what is known of the device."""
    import jax

    device = jax.devices()[0]
    profile = hardware_of(device)
    return {
        "findings": [finding._asdict() for finding in findings()],
        "memory": device.memory_stats(),
        "profile": profile and profile._asdict(),
        "float32_by_default": get_product_precision(device),
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each finding."""
    for finding in found["findings"]:
        yield finding["state"], finding["what"]
    name = found["profile"]["name"] if found["profile"] else "not known"
    yield "its profile", f"{name}; float32 products in {found['float32_by_default']}"
