"""The benchmarks of one accelerator, and a helper to measure in a fresh process."""

import json
import subprocess
import sys
from typing import Any

from ..processes import ROOT

_CODE = """
import importlib, json, sys
module, arguments = json.loads(sys.argv[1])
result = importlib.import_module(module).measure_one(*arguments)
print("\\n" + json.dumps(result))
"""


def measure_in_process(module: str, *arguments: Any) -> dict[str, Any]:
    """Calls `measure_one(*arguments)` of a module in a process of its own.

    Returns:
        The result, or `{"failed": the end of the output}`.
    """
    call = json.dumps([module, arguments])
    done = subprocess.run(
        [sys.executable, "-c", _CODE, call], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        return {"failed": f"exit code {done.returncode}: {done.stderr[-500:]}"}
    return json.loads(done.stdout.strip().rpartition("\n")[2])
