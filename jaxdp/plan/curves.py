"""How a step grows with the devices, drawn with matplotlib."""

import os
from pathlib import Path
from typing import Any

from ..basics.files import naming, replacing


def draw(scaling: Any, path: str | os.PathLike[str]) -> None:
    """Memory, communication and speed over the number of devices, as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`Scaling.plot` needs matplotlib, which is not installed; run"
            ' `pip install "jaxdp[examples]"`. `str(scaling)` is a table.'
        ) from error

    rows = scaling.rows
    panels = {
        "peak per device, bytes": [row.peak for row in rows],
        "sent per device and step, bytes": [row.wire_bytes for row in rows],
    }
    if all(row.step is not None for row in rows):
        panels["rows per second, estimated"] = [row.rows_per_second for row in rows]
        panels["efficiency"] = [row.efficiency for row in rows]

    figure = Figure(figsize=(9, 3 * (len(panels) // 2)), layout="constrained")
    counts = [row.devices for row in rows]
    for number, (title, values) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels) // 2, 2, number)
        axes.plot(counts, values, marker="o")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("devices")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts], fontsize=8)
        is_wide = min(values) > 0 and max(values) > 50 * min(values)
        axes.set_yscale("log" if is_wide else "linear")
        if not is_wide:
            axes.set_ylim(0, 1.06 * max(values) or 1)
        axes.grid(alpha=0.3)

    path = Path(path)
    with naming(path, "plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            kind = path.suffix.removeprefix(".") or "svg"
            figure.savefig(temporary, format=kind)
