"""ServerLock: shows to other processes that this API server lives, by a lock that dies with it."""

import fcntl
from contextlib import suppress
from glob import escape
from pathlib import Path
from uuid import uuid4


class ServerLock:
    """A locked file beside a database. Its name ends with `name`, which is unique."""

    def __init__(self, database: str) -> None:
        self.name = uuid4().hex
        self.path = _path(database, self.name)
        temporary = Path(f"{self.path}.new")
        self._file = temporary.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        temporary.rename(self.path)  # nobody sees it unlocked

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()


def is_alive(database: str, name: str) -> bool:
    """Return whether the API server with this name lives. Remove the file of a dead server."""
    path = _path(database, name)
    with suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        path.unlink()
    return False


def remove_dead(database: str) -> None:
    """Remove the files of servers that were killed."""
    for path in Path(database).parent.glob(f"{escape(Path(database).name)}-server-*"):
        if not path.name.endswith(".new"):  # a server that starts
            is_alive(database, path.name.rpartition("-")[2])


def _path(database: str, name: str) -> Path:
    return Path(f"{database}-server-{name}")
