"""What the metadata of a checkpoint must look like, checked before any of it is used.

The state of each callback is for that callback to judge, in its `load_state_dict`, and
those of loaders (`source`, `place`, `validation`) for `Progress.check`.
"""

from typing import Any, Final

from ..basics.json_checks import (
    anything,
    by_name,
    each,
    either,
    fields,
    maybe,
    number,
    number_text,
    row,
    text,
    truth,
    whole,
)

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


_ALWAYS: Final = {
    "leaves": by_name(_LEAF, least=1),
    "global_step": whole(),
    "current_epoch": whole(),
    "batches_done": whole(),
    "examples_seen": whole(),
    "source": anything,
    "seed": whole(),
    "history": _history,
    "callbacks": by_name(by_name(anything)),
}

_SINCE_FORMAT_2: Final = {
    "versions": by_name(text()),
    "fingerprints": by_name(text("[0-9a-f]{16}", "16 hexadecimal digits")),
    "run_id": RUN_ID,
}

_LATER: Final = {
    "batches_seen": whole(),
    "left_out": each(row(whole(), whole())),
    "after": maybe(whole()),
    "epoch_ended": truth(),
    "val_metrics": by_name(number()),
    "validated_at": whole(),
    "padded_rows": maybe(
        either(
            row(maybe(whole()), by_name(whole()), whole(1)),
            row(maybe(whole()), by_name(whole())),
        )
    ),
    "identities": by_name(text()),
    "strategy": text(),
    "devices": whole(1),
}
"""What not every version has written."""

FORMS: Final = {
    1: fields(_ALWAYS, _LATER),
    2: fields(_ALWAYS | _SINCE_FORMAT_2, _LATER),
}
"""By the format that the metadata says it has."""
