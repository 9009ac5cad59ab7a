"""The servers of `servd run`, `run-batch` and `trace`: their logs, their starts and their ends."""

import re
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import httpx
import psutil
import pytest

from servd.base.errors import ServdError
from servd.terminal.api_client import Client
from servd.terminal.server_process import own_server
from servd.terminal.waiting import describe_start


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the files of servers are."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def log_of(error: BaseException) -> Path:
    match = re.search(r"its log is (\S+)", str(error))
    assert match is not None, str(error)
    return Path(match[1])


def test_a_server_that_does_not_start_says_why(folder: Path, capfd: pytest.CaptureFixture[str]):
    options = {"executor": "fake", "ssl_keyfile": "x"}
    with pytest.raises(ServdError, match="needs --ssl-certfile") as caught, own_server(options):
        pytest.fail("it has started")
    log = log_of(caught.value)
    assert log.parent == folder and "needs --ssl-certfile" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "".join(capfd.readouterr()) == ""


def test_a_start_shows_its_phases_alone(folder: Path):
    log = folder / "log"
    log.write_text("")
    assert str(describe_start(str(log)))
    log.write_text(
        "08:28:04.469 INFO    engine   importing\n"
        "08:28:08.301 INFO    engine   finding weights\n"
        "08:28:08.370 INFO    engine   threads for this worker: 2 (2 CPUs by affinity)\n"
        "08:28:08.370 INFO    api-0    console\n"
    )
    assert str(describe_start(str(log))) == "finding weights"


def test_a_log_without_an_error_is_removed(folder: Path, capfd: pytest.CaptureFixture[str]):
    with own_server({"executor": "fake"}) as connect:
        client: Client = connect()
        assert client.first_model()
        with pytest.raises(ServdError, match="^/v1/nowhere: "):
            client.get("/v1/nowhere")
        [log] = folder.glob("servd-log-*")
        assert "ready" in log.read_text()
    assert [*folder.iterdir()] == []
    assert "".join(capfd.readouterr()) == ""


def test_an_error_of_the_client_is_not_the_servers(folder: Path):
    with pytest.raises(ServdError, match="^my own$"), own_server({"executor": "fake"}):
        raise ServdError("my own")
    assert [*folder.iterdir()] == []


def test_a_server_that_ends_early_is_an_error(folder: Path):
    with (
        pytest.raises(ServdError, match="ended with code -9") as caught,
        own_server({"executor": "fake"}),
    ):
        [server] = psutil.Process().children()
        children = server.children(recursive=True)
        server.kill()
        psutil.wait_procs(children)
    assert "ready" in log_of(caught.value).read_text()


def test_a_server_without_an_address_is_given_none(monkeypatch: pytest.MonkeyPatch):
    client = Client("", uds="/tmp/socket")
    refused = Mock(side_effect=httpx.ConnectError("refused"))  # a real one leaves a socket open
    monkeypatch.setattr(client.http, "stream", refused)
    with pytest.raises(ServdError, match=r"^no server answers \(refused\)$"):
        client.first_model()
