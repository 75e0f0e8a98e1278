"""Real processes to harm, and the table of what they survived."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import time

import pytest

HERE = pathlib.Path(__file__).parent
ROWS = pytest.StashKey[list]()


class Table:
    """A row for each fault: how often it was tried and survived, what a user sees."""

    def __init__(self, rows):
        self.rows = rows

    def add(self, fault, saw, tries=1, survived=None):
        survived = tries if survived is None else survived
        self.rows.append((fault, tries, survived, saw))
        assert survived == tries, f"{fault}: survived {survived} of {tries}"


class Jobs:
    """Starts `job.train` in processes of its own, forked from one that has imported."""

    def __init__(self, folder):
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["job"])

    def start(self, name, target="train", **options):
        import job

        root = self.folder / name
        root.mkdir(exist_ok=True)
        (root / "progress").unlink(missing_ok=True)
        process = self.context.Process(
            target=getattr(job, target), args=(str(root),), kwargs=options
        )
        process.start()
        return process, root

    def run(self, name, **options):
        """Runs a job to its end; its exit code and all it has printed."""
        process, root = self.start(name, **options)
        process.join(120)
        assert process.exitcode is not None, "the job hangs"
        return process.exitcode, self.output(name)

    def output(self, name):
        return (self.folder / name / "output.txt").read_text(errors="replace")

    def result(self, name):
        return json.loads((self.folder / name / "result.json").read_text())

    def wait(self, process, until):
        """Waits until a condition holds or the process has ended."""
        end = time.monotonic() + 120
        while process.is_alive() and not until():
            assert time.monotonic() < end, "the job hangs"
            time.sleep(0.002)

    def wait_for_step(self, process, root, step):
        self.wait(process, lambda: self.step(root) >= step)

    def step(self, root):
        with contextlib.suppress(OSError, ValueError):
            return int((root / "progress").read_text())
        return -1

    def assert_same(self, name, whole, but=()):
        """Asserts that a job ended as one that nothing had happened to."""
        ours, theirs = self.result(name), self.result(whole)
        for key in ours:
            if key not in but:
                assert ours[key] == theirs[key], key


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    pytest.importorskip("torch")
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(HERE), *map(str, HERE.parents[:2]), before]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    jobs = Jobs(tmp_path_factory.mktemp("jobs"))
    assert jobs.run("whole", epochs=6)[0] == 0, jobs.output("whole")
    yield jobs
    os.environ["PYTHONPATH"] = before


@pytest.fixture
def table(pytestconfig):
    return Table(pytestconfig.stash.setdefault(ROWS, []))


def merged(rows):
    """One row for each fault and what was seen of it."""
    counts = {}
    for fault, tries, survived, saw in rows:
        before = counts.get((fault, saw), (0, 0))
        counts[fault, saw] = before[0] + tries, before[1] + survived
    return [(fault, *count, saw) for (fault, saw), count in counts.items()]


def pytest_terminal_summary(terminalreporter, config):
    rows = merged(config.stash.get(ROWS, []))
    if not rows:
        return
    lines = ["| fault | tries | survived | what the user saw |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    terminalreporter.write_line("\n" + "\n".join(lines))
    if path := os.environ.get("JAXDP_FAULTS_TABLE"):
        page = pathlib.Path(path)
        begin, end = "<!-- table -->\n", "<!-- end of table -->\n"
        head, _, rest = page.read_text().partition(begin)
        tail = rest.partition(end)[2]
        page.write_text(head + begin + "\n".join(lines) + "\n" + end + tail)
