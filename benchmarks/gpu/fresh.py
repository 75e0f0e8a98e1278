"""A function of a part, called in a process of its own."""

import json
import subprocess
import sys
from typing import Any

from ..processes import ROOT

_CODE = """
import importlib, json, sys
module, arguments = json.loads(sys.argv[1])
found = importlib.import_module(module).one(*arguments)
print("\\n" + json.dumps(found))
"""


def one(module: str, *arguments: Any) -> dict[str, Any]:
    """What `one(*arguments)` of a module returns, or `{"failed": ...}`."""
    call = json.dumps([module, arguments])
    done = subprocess.run(
        [sys.executable, "-c", _CODE, call], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        return {"failed": f"exit code {done.returncode}: {done.stderr[-500:]}"}
    return json.loads(done.stdout.strip().rpartition("\n")[2])
