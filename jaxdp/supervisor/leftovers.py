"""Where snapshots and channels are: found, made, and removed after those who died.

    <root>/                   the user's alone; in /dev/shm by default
    <root>/session-<random>/  where a supervisor meets its child; locked while it lives
    <root>/<name>/            the snapshots of one run, and whose.json
    <checkpoints>/.snapshots  has that name, beside the checkpoints of the run

Both sides name each other. Where checkpoints were removed, moved or copied they don't,
and then those snapshots are nobody's.
"""

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

try:
    import fcntl
except ImportError:  # Windows, where nothing is supervised
    fcntl: Any = None

_TOKEN: Final = ".snapshots"
_WHOSE: Final = "whose.json"
_NAME: Final = re.compile("[0-9a-f]{32}")
_SESSION: Final = "session-"


def root_in(folder: str | None) -> Path:
    """The user's own folder in `folder`, which is /dev/shm or /tmp by default.

    Raises:
        ValueError: if it can't be made, or others have a hand in it.
    """
    if folder is None:
        memory = "/dev/shm"
        can_write = os.path.isdir(memory) and os.access(memory, os.W_OK)
        folder = memory if can_write else tempfile.gettempdir()
    path = Path(os.path.abspath(folder), f"jaxdp-{os.geteuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ValueError(f"`--snapshot-dir`: {path} can't be made: {error}.") from error
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"`--snapshot-dir`: {path} is not a folder that only you can use (mode"
            " 0700). Remove it, or pass another `--snapshot-dir`."
        )
    return path


def find_snapshots(root: str, checkpoints: str) -> str | None:
    """The folder of the snapshots that belong to a folder of checkpoints, if any."""
    try:
        name = Path(checkpoints, _TOKEN).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    path = Path(root, name)
    if not _NAME.fullmatch(name) or path.is_symlink():
        return None
    return str(path) if _whose(path).get("checkpoints") == checkpoints else None


def make_snapshots(root: str, checkpoints: str, session: str) -> str:
    """Makes `find_snapshots` find one; says that it is in use by a session.

    Raises:
        OSError: where there is no room, say.
    """
    found = find_snapshots(root, checkpoints)
    path = Path(found or os.path.join(root, uuid.uuid4().hex))
    path.mkdir(mode=0o700, exist_ok=True)
    whose = {"checkpoints": checkpoints, "session": session}
    _write(path / _WHOSE, json.dumps(whose))
    if found is None:
        _write(Path(checkpoints, _TOKEN), path.name)
    return str(path)


def remove_snapshots(path: str) -> None:
    """Removes the snapshots of a run, and what points to them."""
    checkpoints = _whose(Path(path)).get("checkpoints")
    shutil.rmtree(path, ignore_errors=True)
    if checkpoints is not None:
        token = Path(checkpoints, _TOKEN)
        with contextlib.suppress(OSError, ValueError):
            if token.read_text(encoding="ascii") == os.path.basename(path):
                token.unlink()


def open_session(root: Path) -> tuple[str, int]:
    """A new folder for a supervisor and its child, and the lock that shows it lives."""
    with _alone_in(root):
        path = tempfile.mkdtemp(prefix=_SESSION, dir=root)
        lock = os.open(path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def close_session(path: str, lock: int) -> None:
    """Removes the folder of a supervisor, and the root if nobody else uses it."""
    root = Path(path).parent
    with _alone_in(root):
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # it is not empty
            root.rmdir()


def of_session(root: Path, session: str) -> list[str]:
    """The folders of snapshots that a session has made, or taken up."""
    name = os.path.basename(session)
    return [str(p) for p in _runs(root) if _whose(p).get("session") == name]


def sweep(root: Path) -> list[str]:
    """Removes what the dead have left and nobody can use; tells of it and the rest."""
    with _alone_in(root):
        return list(_swept(root))


def _swept(root: Path) -> Iterator[str]:
    for path in root.glob(f"{_SESSION}*"):
        if not _is_alive(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in _runs(root):
        whose = _whose(path)
        if _is_alive(root / str(whose.get("session"))):
            continue
        checkpoints = whose.get("checkpoints", "")
        steps = steps_in(path)
        size = sum(each.stat().st_size for each in path.iterdir()) / 2**20
        what = f"{path} ({size:,.0f} MiB), left by a run that died,"
        if find_snapshots(str(root), checkpoints) != str(path):
            shutil.rmtree(path, ignore_errors=True)
            yield f"{what} is removed: its checkpoints are gone"
        elif steps:
            yield f"{what} has a snapshot of step {steps[-1]} for {checkpoints}"


def steps_in(path: str | Path) -> list[int]:
    """The steps of which there are snapshots, in ascending order."""
    try:
        return sorted(int(name) for name in os.listdir(path) if name.isdecimal())
    except FileNotFoundError:
        return []


def _runs(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if _NAME.fullmatch(path.name)]


def _whose(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / _WHOSE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(session: Path) -> bool:
    """Whether a supervisor holds the lock of its folder."""
    try:
        folder = os.open(session, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(folder)
    return False


@contextlib.contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """No other supervisor begins, ends or sweeps meanwhile."""
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed by one that has ended
            lock = os.open(root, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock), root.stat()):
                break
            os.close(lock)
    try:
        yield
    finally:
        os.close(lock)


def _write(path: Path, text: str) -> None:
    """In one piece: who looks sees the old text or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # a link could lead anywhere
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
