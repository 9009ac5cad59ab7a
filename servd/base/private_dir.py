"""Private folders for the sockets between the processes of one tree."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from servd.base.errors import ConfigError

# environment of a child: its parent's folder, which the parent removes in any case
PARENT_DIR = "SERVD_IPC_DIR"
LOCK = "owner.lock"  # in a private folder, held as long as the process that made it lives
MAX_BASE = 60  # characters
LAST_RESORTS = ["/tmp", "/dev/shm", "/run"]
LOCK_GRACE = 60  # seconds that a new lock file may not be held yet

_locks: dict[Path, int] = {}  # private folder -> the descriptor that holds its lock


def private_dir() -> Path:
    """Return a new folder that only this user may enter, for the sockets of one process tree. Also
    removes the folders that killed processes left.

    The path is short: see `servd.ipc.channels.MAX_SOCKET_PATH`.
    """
    base = find_base()
    _sweep(Path(base))
    folder = Path(tempfile.mkdtemp(prefix="servd-", dir=base))  # mkdtemp makes it 0700
    _locks[folder] = os.open(folder / LOCK, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: nobody else can lock it either
        fcntl.flock(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def find_base() -> str:
    """Return the first folder that can hold sockets: the user's own, or shared memory."""
    candidates = [os.environ.get(name, "") for name in (PARENT_DIR, "XDG_RUNTIME_DIR")]
    with suppress(FileNotFoundError):  # Python found none
        candidates.append(tempfile.gettempdir())
    folders = [folder for folder in dict.fromkeys([*candidates, *LAST_RESORTS]) if folder]
    for folder in folders:
        if os.access(folder, os.W_OK | os.X_OK) and len(folder) <= MAX_BASE:
            return folder
    raise ConfigError(
        f"none of {', '.join(folders)} can be written, for sockets: set TMPDIR to a folder whose "
        f"path has at most {MAX_BASE} characters"
    )


def _sweep(base: Path) -> None:
    """Remove the private folders of processes that were killed: their locks are free."""
    for removed in [folder for folder in _locks if not folder.exists()]:
        os.close(_locks.pop(removed))
    for lock in base.glob(f"servd-*/{LOCK}"):
        with suppress(OSError):  # another user's, in use, or removed meanwhile
            status = lock.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < LOCK_GRACE:
                continue
            descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
            finally:
                os.close(descriptor)
