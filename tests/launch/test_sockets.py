"""Sockets that somebody else has opened: what is taken, and what is said of the rest."""

import os
import socket
import sys
from pathlib import Path

import pytest

from servd.api.server import tell_systemd
from servd.base.errors import ConfigError
from servd.launch import sockets


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.open("w"), "descriptor"),
        (lambda path: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), "does not listen"),
        (lambda path: socket.create_server(("127.0.0.1", 0)), None),
    ],
)
def test_only_a_socket_that_listens_is_taken_over(make, reason, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    file = make(tmp_path / "file")
    monkeypatch.setattr(sockets, "FIRST_INHERITED", os.dup(file.fileno()))
    file.close()
    if reason is None:
        with sockets.inherited_listener() as listener:
            assert listener.getsockname()[1] and not listener.get_inheritable()
    else:
        with pytest.raises(ConfigError, match=f"LISTEN_FDS.*{reason}"):
            sockets.inherited_listener()
    assert "LISTEN_FDS" not in os.environ


def test_nobody_to_notify_is_a_warning(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    tell_systemd("READY=1")
    assert "NOTIFY_SOCKET" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")
@pytest.mark.parametrize("name", ["@servd-test-notify", "{}/user@1/notify"])
def test_the_name_of_the_socket_to_notify_may_be_abstract(name: str, tmp_path: Path, monkeypatch):
    path = name.format(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        if path.startswith("@"):
            channel.bind(f"\0{path[1:]}")
        else:
            Path(path).parent.mkdir()
            channel.bind(path)
        channel.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        tell_systemd("READY=1")
        assert channel.recv(100) == b"READY=1"
