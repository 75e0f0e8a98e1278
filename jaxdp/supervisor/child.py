"""Runs a script as `python script.py` would, and notes how it ended.

Run by path, with the standard library alone: what the script imports is its own affair.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import types
from typing import Any, Final

VARIABLE: Final = "JAXDP_SUPERVISED"
"""The environment variable with the folder in which parent and child meet."""

END: Final = "end.json"
_PR_SET_PDEATHSIG: Final = 1


def main(parent: str, script: str) -> None:
    """Becomes the script `script`, a child of the process `parent`.

    Its arguments are `sys.argv` already.
    """
    _die_with(int(parent))
    script = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(script)
    module: Any = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = script, __builtins__
    sys.modules["__main__"] = module
    sys.excepthook = _without_our_frame
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        exec(code, module.__dict__)
    except BaseException as error:
        _note(error)
        raise


def _die_with(parent: int) -> None:
    """However the parent ends, `kill -9` included, this process ends too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it had ended before


def _note(error: BaseException) -> None:
    with contextlib.suppress(Exception):  # then only the exit code tells
        kinds = [kind.__name__ for kind in type(error).__mro__]
        noted = {"kinds": kinds, "text": str(error)[:500]}
        text = json.dumps(noted, ensure_ascii=False).encode(errors="replace")
        with open(os.path.join(os.environ[VARIABLE], END), "r+b") as file:
            file.write(text)  # over blanks: no room is asked for


def _without_our_frame(kind: Any, error: Any, frames: Any) -> None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    sys.__excepthook__(kind, error.with_traceback(frames), frames)


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv.pop(0), sys.argv[0])
