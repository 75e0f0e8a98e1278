"""Several processes that train together, started for a test and ended with it."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import signal
import time

from toys import free_port

LIMIT = 300


class Crew:
    """The processes of one job, forked from one that has imported everything.

    Each calls `tasks.<task>(**options)` after `jaxdp.distributed.initialize`; what it
    prints goes to `<folder>/<process>.txt`.
    """

    context = multiprocessing.get_context("forkserver")

    def __init__(
        self, folder, compiled, task, *, processes=2, only=None, start=None, **options
    ):
        import tasks

        self.context.set_forkserver_preload(["tasks"])
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        start = {"compiled": compiled, **(start or {})}
        self.port = start.pop("port", None) or free_port()
        self.processes = [
            self.context.Process(
                target=tasks.run,
                args=(task, index, processes, self.port, str(self.folder), start),
                kwargs=options,
                daemon=True,
            )
            for index in (range(processes) if only is None else only)
        ]
        for process in self.processes:
            process.start()

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def join(self, but=(), limit=LIMIT):
        """The exit codes and outputs of all, when they have come to their ends."""
        end = time.monotonic() + limit
        for index, process in enumerate(self.processes):
            if index not in but:
                process.join(max(0.0, end - time.monotonic()))
                assert process.exitcode is not None, self.all_outputs()
        return (
            [process.exitcode for process in self.processes],
            [self.output(index) for index in range(len(self.processes))],
        )

    def finish(self, code=0, limit=LIMIT):
        """The outputs of all, which have ended with this exit code."""
        codes, outputs = self.join(limit=limit)
        assert codes == [code] * len(codes), self.all_outputs()
        return outputs

    def wait_for(self, pattern, index=0):
        """Until a process has printed something."""
        end = time.monotonic() + LIMIT
        while not re.search(pattern, self.output(index)):
            assert self.processes[index].is_alive(), self.all_outputs()
            assert time.monotonic() < end, self.all_outputs()
            time.sleep(0.02)

    def signal(self, index, name):
        os.kill(self.processes[index].pid, getattr(signal, name))

    def output(self, index):
        path = self.folder / f"{index}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def all_outputs(self):
        outputs = map(self.output, range(len(self.processes)))
        return "\n".join(f"--- {i}\n{text}" for i, text in enumerate(outputs))
