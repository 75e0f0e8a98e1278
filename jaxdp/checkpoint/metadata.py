"""What the metadata of a checkpoint looks like.

The state of each callback is for that callback to read, and those of loaders
(`source`, `place`, `validation`) for `Progress`.
"""

import re
from typing import Any, Final

from ..basics.files import check_fields

FORMAT: Final = 3
"""Version of the layout on disk."""

FORMATS: Final = (2, FORMAT)
"""Those that are read. The second has a digest and fingerprints beside `files.json`."""

_SCHEMA: Final = {
    "versions": dict,
    "leaves": dict,
    "run_id": str,
    "global_step": int,
    "current_epoch": int,
    "batches_done": int,
    "batches_seen": int,
    "examples_seen": int,
    "source": object,
    "place": object,
    "validation": object,
    "after": int | None,
    "epoch_ended": bool,
    "val_metrics": dict,
    "validated_at": int,
    "logged": dict | None,  # None: not in checkpoints of 0.1 or 0.2
    "seed": int,
    "history": dict,
    "record": dict | None,  # None: in checkpoints of formats 2 and 3 of before
    "callbacks": dict,
    "identities": dict,
    "padded_rows": list,
    "arguments": dict | None,
    "strategy": str,
    "compiler_options": dict | None,
    "devices": int,
    "evaluated": dict | None,
    "beside_adapters": dict | None,  # [what, fingerprint] of what was left out
}


def check_schema(meta: Any) -> None:
    """Raises a ValueError unless this is the metadata that a trainer saves."""
    check_fields(meta, _SCHEMA, "metadata")
    # It becomes a part of file names.
    if not re.fullmatch("[0-9a-f]{32}", meta["run_id"]):
        raise ValueError("`metadata.run_id` must be 32 hexadecimal digits")
