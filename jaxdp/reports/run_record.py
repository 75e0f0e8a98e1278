"""What is recorded of a run beside its table, as it must look to be shown."""

from pathlib import Path
from typing import Any, Final

from ..basics.json_checks import (
    anything,
    by_name,
    each,
    fields,
    maybe,
    number,
    read_json,
    text,
    whole,
)

_LEAF: Final = fields(
    {
        **dict.fromkeys(("part", "path", "dtype", "spec"), text()),
        **dict.fromkeys(("shape", "splits"), each(whole())),
        **dict.fromkeys(("copies", "bytes", "bytes_per_device"), whole()),
    }
)

_RECORD: Final = fields(
    {},
    {
        **dict.fromkeys(("hyperparameters", "versions", "hardware"), by_name(anything)),
        "layout": each(_LEAF),
        "plan": maybe(
            fields({"memory": fields({"peak": number()}), "wire_bytes": number()})
        ),
    },
)

_MOST_BYTES: Final = {".csv": 2**31, ".html": 2**26}
"""A row takes a few hundred; nothing that `CSVLogger` writes comes near."""


def read_record(path: Path) -> dict[str, Any]:
    """What `CSVLogger` has recorded of a run; nothing if there is no such file.

    Raises:
        ValueError: if it is something else.
    """
    if not path.is_file():
        return {}
    try:
        record = read_json(path)
        _RECORD(record, "record")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`{path}` is not what `CSVLogger` writes: {error}. Move it away to see the"
            " table alone."
        ) from error
    return record


def check_size(path: Path) -> None:
    """Raises a ValueError if a file of a run is too large to be read whole."""
    size, most = path.stat().st_size, _MOST_BYTES.get(path.suffix, 2**26)
    if size > most:
        raise ValueError(f"`{path}` has {size:,} bytes, and {most:,} are the most")
