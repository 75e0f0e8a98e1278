"""What the metadata of a checkpoint must look like, checked before any of it is used.

A digest in it tells whether it is what was saved. The state of each callback is for
that callback to judge, in its `load_state_dict`, and those of loaders (`source`,
`place`, `validation`) for `Progress.check`.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from ..basics.json_checks import (
    anything,
    by_name,
    each,
    fields,
    maybe,
    number,
    number_text,
    row,
    text,
    truth,
    whole,
)

FORMAT: Final = 2
"""Version of the layout on disk."""

MOST_FORMATS: Final = 1000
"""Nothing that was saved by any version has a higher number."""

RUN_ID: Final = text("[0-9a-f]{32}", "32 hexadecimal digits")

_LEAF: Final = text(
    r"[a-z][a-z0-9_]{0,30}\((\d{1,18}(, ?|(?=\))))*\)", "a dtype and shape"
)


def _history(value: Any, name: str) -> None:
    """Columns as long as the list of epochs, which ascend."""
    fields(
        {
            "epochs": each(whole()),
            "metrics": by_name(each(maybe(number_text()))),
        }
    )(value, name)
    epochs = value["epochs"]
    if any(a >= b for a, b in zip(epochs, epochs[1:], strict=False)):
        raise ValueError(f"`{name}.epochs` do not ascend")
    if any(len(column) != len(epochs) for column in value["metrics"].values()):
        raise ValueError(f"`{name}.metrics` are not one value for each epoch")


FORM: Final = fields(
    {
        "versions": by_name(text()),
        "leaves": by_name(_LEAF, least=1),
        "fingerprints": by_name(text("[0-9a-f]{16}", "16 hexadecimal digits")),
        "run_id": RUN_ID,
        "global_step": whole(),
        "current_epoch": whole(),
        "batches_done": whole(),
        "examples_seen": whole(),
        "source": anything,
        "place": anything,
        "validation": anything,
        "seed": whole(),
        "history": _history,
        "callbacks": by_name(by_name(anything)),
        "batches_seen": whole(),
        "after": maybe(whole()),
        "epoch_ended": truth(),
        "val_metrics": by_name(number()),
        "validated_at": whole(),
        "padded_rows": row(maybe(whole()), by_name(whole()), whole(1)),
        "identities": by_name(text()),
        "strategy": text(),
        "devices": whole(1),
    },
    {  # which those of before do not have
        "logged": by_name(number()),
        "compiler_options": by_name(text()),
        "evaluated": by_name(text()),
        "arguments": by_name(text()),
        "left_out": each(row(whole(), whole())),  # of 0.2, by a guard that is no more
    },
)


def digest(meta: Mapping[str, Any]) -> str:
    """The SHA-256 of metadata."""
    content = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()
