"""The sockets of a server: its port, and the folder of the Unix sockets of its processes."""

import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servd.base.errors import ConfigError
from servd.base.private_dir import private_dir
from servd.config import Config
from servd.core.client import MPClient, engine_dir
from servd.ipc import channels as ipc
from servd.launch.engine_supervisor import newest_engine, somebody_listens
from servd.messages.engine import EngineGone

LONGEST_SOCKET_NAME = f"client-{2**31 - 1}"

FIRST_INHERITED = 3  # descriptor of the first socket from systemd
ATTACH_TIMEOUT = 5.0  # seconds for an engine's first word


def inherited_listener() -> socket.socket | None:
    """Return the listening socket passed by systemd or another parent, or None; see
    sd_listen_fds(3). It overrides --host, --port and --uds. Raise ConfigError if there are several
    sockets, or the descriptor is not a listening socket.
    """
    count, pid = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID"))
    if pid != str(os.getpid()):
        return None
    if count != "1":
        raise ConfigError(f"LISTEN_FDS={count}: must be 1, servd listens on one socket")
    try:
        os.set_inheritable(FIRST_INHERITED, False)
        listener = socket.socket(fileno=FIRST_INHERITED)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {FIRST_INHERITED}: {error.strerror}") from None
    if not listens:
        listener.close()
        raise ConfigError("LISTEN_FDS: the socket does not listen; it must be a ListenStream")
    return listener


def listen(config: Config) -> socket.socket:
    """Return a socket that listens on the port or Unix socket. Connections wait in its backlog
    until the servers are up. Raise ConfigError if the port is in use or not permitted.
    """
    server = config.server
    if server.uds:
        return listen_uds(server.uds)
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        return socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        hint = "choose another with --port" if error.errno == 98 else "check --host and --port"
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}; {hint}"
        ) from None


def listen_uds(path: str) -> socket.socket:
    """Return a listening Unix socket. Replace a file on which no process listens anymore."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(
                    f"--uds {path}: this is not a socket; choose another path, or remove it"
                )
            if somebody_listens(path):
                raise ConfigError(f"--uds {path}: another process listens there")
            os.unlink(path)
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return listener


def check_private(folder: str, flag: str) -> None:
    """Check that no other user can access a folder, because its sockets control the engine. Raise
    ConfigError if another user owns the folder or has permissions.
    """
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{flag} {folder}: this folder belongs to another user")
    if status.st_mode & 0o077:
        raise ConfigError(f"{flag} {folder}: other users may enter this folder; chmod 700 it")


def open_batch_dir(folder: str) -> None:
    """Create the folder of batches if needed. Raise ConfigError if that fails."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--batch-dir {folder}: {error.strerror}") from None
    check_private(folder, "--batch-dir")


def check_engine(ipc_dir: str, identity: str) -> None:
    """Check that the engine of a folder has the identity of this API server. Raise ConfigError if
    the engine has another version or model.
    """
    generation = newest_engine(ipc_dir)
    client = MPClient(ipc_dir, secrets.randbits(31), identity, generation)
    try:
        answer = client.recv(ATTACH_TIMEOUT)  # None if it has just started: retried
    finally:
        client.close()
    if isinstance(answer, EngineGone):
        raise ConfigError(f"--attach {ipc_dir}: {answer.reason}; start both with the same options")


@contextmanager
def socket_folder(config: Config) -> Iterator[str]:
    """Yield the folder of the sockets: --attach, --ipc-dir, or a temporary one, removed at exit.
    Raise ConfigError if its path is too long, its engine is missing (--attach) or another is there.
    """
    server = config.server
    path = server.attach or server.ipc_dir or str(private_dir())
    last_rank = config.parallel.data_parallel_size - 1
    longest_path = os.path.join(engine_dir(path, last_rank), LONGEST_SOCKET_NAME)
    if (excess := len(os.fsencode(longest_path)) - ipc.MAX_SOCKET_PATH) > 0:
        raise ConfigError(f"--ipc-dir {path}: too long by {excess} bytes for the path of a socket")
    if server.attach and os.path.isdir(path):
        check_private(path, "--attach")
    has_engine = newest_engine(path) >= 0
    if server.attach and not has_engine:
        raise ConfigError(f"--attach {path}: no engine listens there; start one with --headless")
    if server.ipc_dir:
        if has_engine:
            raise ConfigError(
                f"--ipc-dir {path}: another engine listens there; choose another folder"
            )
        os.makedirs(path, mode=0o700, exist_ok=True)
        check_private(path, "--ipc-dir")
    try:
        yield path
    finally:
        if not (server.attach or server.ipc_dir):
            shutil.rmtree(path, ignore_errors=True)
        elif not server.attach:  # a stale socket would look like an engine to --attach
            for socket_file in Path(path).glob("engine*"):
                socket_file.unlink()
            for folder in Path(path).glob("rank-*"):
                shutil.rmtree(folder, ignore_errors=True)
