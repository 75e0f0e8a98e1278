"""What the library tells the user, on the logger "jaxdp"."""

import logging
import sys

_logger = logging.getLogger("jaxdp")


class _Stderr(logging.Handler):
    """To the present `sys.stderr`, unless the program has set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        text = f"jaxdp: {record.getMessage()}"
        tqdm = sys.modules.get("tqdm.std")
        if tqdm is not None:  # so that the line is not written over a bar
            tqdm.tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr)


if not _logger.handlers:
    _logger.addHandler(_Stderr())
    _logger.setLevel(logging.INFO)


def say(message: str) -> None:
    """Tells the user something that needs no action."""
    _logger.info(message)
