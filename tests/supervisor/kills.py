"""Harms a supervised run at random moments; says what came of it, and how soon.

    python tests/supervisor/kills.py 100 docs/reliability.md
    python tests/supervisor/kills.py 20 "" 7    # with other moments, and no page

Kinds of harm take turns. Before and after, such a run is started by hand from its
checkpoint some times, to compare with. The table goes between the marks `supervised`
of the page.
"""

import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

SCRIPT = str(pathlib.Path(__file__).with_name("script.py"))
EVERY, DEADMAN, PAUSE, STARTS = 5, 3.0, 0.02, 5
KINDS = {
    "kill -9": "SIGKILL",
    "a segmentation fault": "SIGSEGV",
    "kill -STOP": "SIGSTOP",
    "Python's lock is held for ever": "SIGUSR1",  # which the script answers so
    "a full disk": "",
}


class Run:
    """A run in a folder, started by hand or supervised; what it has noted so far."""

    def __init__(self, root, name, *options, disk=None, **settings):
        self.folder, self.notes = disk or root / name / "run", root / name / "notes"
        for path in (self.folder, self.notes):
            path.mkdir(parents=True, exist_ok=True)
        settings = json.dumps({"notes": str(self.notes), **settings})
        start = ["-m", "jaxdp", "run", *options] if options else []
        self.output = root / name / "output"
        self.started = time.time()
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, *start, SCRIPT, str(self.folder), settings],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def steps(self):
        """Step, time and process of each that was taken."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.notes / "steps").read_text().splitlines(keepends=True)
            split = [line.split() for line in lines if line.endswith("\n")]
            return [(int(step), float(at), int(who)) for step, at, who in split]
        return []

    def wait(self, condition):
        """Until it holds; whether it did before the run's end."""
        while not condition():
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def newer_than(self, step, before):
        """The time of the first step that is newer than one of a process before."""
        times = [at for s, at, who in self.steps() if s > step and who != before]
        return times[0] if times else None


def by_hand(root, number, **settings):
    """Seconds from a start by hand to the first new step; the first one begins it."""
    name = "by hand"
    if number == 0:
        first = Run(root, name, every=EVERY, **settings)
        first.wait(lambda: len(first.steps()) > 3 * EVERY)
        first.process.kill()
        first.process.wait()
    again = Run(root, name, **settings)
    known = {who for *_, who in again.steps()}
    again.wait(lambda: {who for *_, who in again.steps()} - known)
    taken = next(at for _, at, who in again.steps() if who not in known)
    again.process.kill()
    again.process.wait()
    return taken - again.started


def harm(run, kind, disk):
    """Does it; the last step before, the process, and when."""
    step, _, process = run.steps()[-1]
    when = time.time()
    if KINDS[kind]:
        os.kill(process, getattr(signal, KINDS[kind]))
        return step, process, when
    with contextlib.suppress(OSError), open(disk / "ballast", "wb", 0) as file:
        while True:
            file.write(bytes(4096))
    run.wait(lambda: not os.path.exists(f"/proc/{process}"))
    when = time.time()
    (disk / "ballast").unlink()
    return run.steps()[-1][0], process, when


def main(kills, page=None, seed=0):
    """Runs it all; the exit status."""
    generator, rows = random.Random(seed), {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        disk = root / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            del rows["a full disk"]
        settings = {"pause": PAUSE, "epochs": kills * 2}
        options = f"--max-restarts {9 * kills} --deadman {DEADMAN}".split()
        options += ["--snapshot-every", str(EVERY), "--snapshot-dir", str(root)]
        try:
            hand = [by_hand(root, n, **settings) for n in range(STARTS)]
            run = Run(root, "harmed", *options, disk=disk, **settings)
            kinds, repeated = itertools.cycle(rows), []
            for number in range(kills):
                process = run.steps()[-1][2] if run.steps() else None
                count = len(run.steps()) + generator.randint(2, 20)
                if not run.wait(lambda count=count: len(run.steps()) > count):
                    break
                time.sleep(generator.uniform(0, PAUSE))
                kind = next(kinds)
                step, process, when = harm(run, kind, disk)
                if not run.wait(
                    lambda s=step, p=process: run.newer_than(s, p) is not None
                ):
                    break
                rows[kind].append(run.newer_than(step, process) - when)
                taken = run.steps()
                first = next(
                    s
                    for i, (s, _, who) in enumerate(taken)
                    if i and taken[i - 1][2] == process != who
                )
                last = max(s for s, _, who in taken if who == process)
                repeated.append(last + 1 - first)
                print(number, kind, f"{rows[kind][-1]:.1f} s", repeated[-1], flush=True)
            code = run.process.wait()
            hand += [by_hand(root, n, **settings) for n in range(1, STARTS)]
            whole = Run(root, "whole", **settings | {"pause": 0})
            whole.process.wait()
            results = [path / "result.json" for path in (run.folder, whole.folder)]
            same = code == 0 and len({path.read_text() for path in results}) == 1
            rest = [p for p in root.glob("jaxdp-*")]
        finally:
            if "a full disk" in rows:
                subprocess.run(["umount", "-l", str(disk)])
    text = table(rows, hand, repeated, same and not rest)
    print(text, code, rest)
    if page:
        path = pathlib.Path(page)
        begin, end = "<!-- supervised -->\n", "<!-- end of supervised -->\n"
        head, _, rest_of_page = path.read_text().partition(begin)
        path.write_text(head + begin + text + end + rest_of_page.partition(end)[2])
    return int(not same or bool(rest) or max(repeated) > EVERY)


def table(rows, hand, repeated, survived):
    """Markdown: for each kind how often, and the seconds to the next new step."""
    start = statistics.median(hand)
    lines = [
        "| fault | tries | seconds to the next new step | divided by a start by hand |"
    ]
    lines += ["|---|---|---|---|"]
    for kind, times in rows.items():
        if times:
            waited = DEADMAN if KINDS[kind] in ("SIGSTOP", "SIGUSR1") else 0.0
            seconds = statistics.median(times) - waited
            after = f" after {waited:g} of silence" if waited else ""
            ratio = f"{seconds / start:.2f}"
            lines.append(f"| {kind} | {len(times)} | {seconds:.1f}{after} | {ratio} |")
    lines.append(f"| started by hand | {len(hand)} | {start:.1f} | 1 |")
    ends = "equal" if survived else "NOT equal"
    lines += [
        "",
        f"After {len(repeated)} faults in one run with `--snapshot-every {EVERY}`, its"
        " parameters,",
        f"history and log were {ends} to those of the undisturbed run, and no files",
        f"were left behind. At most {max(repeated)} steps were repeated.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
