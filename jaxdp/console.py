"""What the library tells the user, on the logger "jaxdp"."""

import logging
import sys

_logger = logging.getLogger("jaxdp")


class _Stderr(logging.Handler):
    """To the present `sys.stderr`, unless the program has set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(f"jaxdp: {record.getMessage()}", file=sys.stderr)


if not _logger.handlers:
    _logger.addHandler(_Stderr())
    _logger.setLevel(logging.INFO)


def say(message: str) -> None:
    """Tells the user something that needs no action."""
    _logger.info(message)
