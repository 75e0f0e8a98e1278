"""Scripts in forks of one process, which has imported what all of them import."""

import json
import subprocess
import sys

SERVER = """
import json, os, runpy, sys
import equinox, jax.numpy, optax
from jaxdp import Trainer, callbacks
try:
    import matplotlib.pyplot
except ImportError:
    pass

for line in sys.stdin:
    script, folder, log = json.loads(line)
    process = os.fork()
    if not process:
        for number, file in enumerate((os.devnull, log, log)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        os.chdir(folder)
        sys.argv[:], sys.path[0] = [script], folder
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    status = os.waitpid(process, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Scripts:
    """Runs scripts as `python script.py` does, without the seconds that imports take.

    Args:
        environment: of all of them.
    """

    def __init__(self, environment):
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, script):
        """The exit code and the output of a script, run in its folder."""
        log = script.with_suffix(".log")
        order = [str(script), str(script.parent), str(log)]
        print(json.dumps(order), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline()), log.read_text()

    def close(self):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
