"""The tree of processes, without processes: what signals do."""

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme

from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.ipc.heartbeat import Heartbeat, Watchdog
from servd.launch import events
from servd.launch.core_engines import CoreEngineProcManager
from servd.launch.process_tree import ProcessTree
from servd.messages.engine import EngineGone
from tests.adapters import write_adapter


class Reader:
    """Options that are read again: counts how often."""

    def __init__(self) -> None:
        self.reads = 0
        self.options: dict[str, object] = {"attach": "/nowhere"}

    def __call__(self) -> Config:
        self.reads += 1
        return Config.load(self.options)


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def tree(reader: Reader) -> ProcessTree:
    return ProcessTree(reader(), FAKE_SPEC, {}, "/nowhere", None, reader)


def test_many_hang_ups_at_once_are_one_and_a_later_one_is_another(tree, reader):
    tree.events.had_terminal = False
    for _ in range(400):
        tree.events.on_signal(signal.SIGHUP, None)
    tree.events.on_signal(signal.SIGTERM, None)
    assert tree.run() == 0
    assert reader.reads == 2  # the first at the start
    tree.events.on_signal(signal.SIGHUP, None)
    tree.events.on_signal(signal.SIGTERM, None)
    assert tree.run() == 0
    assert reader.reads == 3


def test_a_signal_to_end_is_heard_behind_hang_ups(tree):
    tree.events.on_signal(signal.SIGHUP, None)
    tree.events.on_signal(signal.SIGINT, None)
    assert [tree.events.queue.get() for _ in range(2)] == [signal.SIGHUP, signal.SIGINT]


def test_a_hang_up_does_not_cut_a_drain_short(tree):
    class Open:
        """An API server whose requests end after a while."""

        exit_code, name = None, "api-0"

    tree.events.had_terminal = False
    server = Open()
    tree.api_servers.processes = [server]
    tree.api_servers.watches["api-0"] = Watchdog(Heartbeat(), interval=1.0, timeout=600.0)

    def finish() -> None:
        server.exit_code = 0
        tree.events.queue.put(server)

    tree.events.on_signal(signal.SIGHUP, None)
    timer = threading.Timer(0.2, finish)
    timer.start()
    tree.wait_for_api_servers(10, keep_engines=False)
    assert server.exit_code == 0
    server.exit_code = None
    tree.events.on_signal(signal.SIGTERM, None)
    tree.wait_for_api_servers(10, keep_engines=False)
    assert server.exit_code is None


def test_an_engine_that_dies_in_a_drain_is_started_again(tree):
    """Else open requests would wait until time is up. One that ends in order was told to."""
    tree.api_servers.processes = [SimpleNamespace(exit_code=None, name="api-0")]
    engines = [SimpleNamespace(exit_code=None) for _ in range(2)]
    started: list[int] = []
    supervisors = [
        SimpleNamespace(child=engine, replace=lambda rank=rank: started.append(rank))
        for rank, engine in enumerate(engines)
    ]
    tree.core_engines = CoreEngineProcManager(supervisors, None)
    for exit_code, goes_on in ((-9, True), (1, True), (0, False)):
        engines[1].exit_code = exit_code
        tree.events.queue.put(engines[1])
        tree.events.queue.put(signal.SIGTERM)
        tree.wait_for_api_servers(30, keep_engines=True)
        assert tree.events.queue.empty() == goes_on
    assert started == [1, 1]


def test_requests_are_told_in_a_drain_that_no_engine_will_come(tree):
    server = SimpleNamespace(exit_code=None, name="api-0")
    engine = SimpleNamespace(exit_code=-9)
    tree.api_servers.processes = [server]
    tree.api_servers.folders = ["here", "there"]
    supervisor = SimpleNamespace(child=engine, replace=lambda: "it died too often")
    tree.core_engines = CoreEngineProcManager([supervisor], None)
    messages = []

    def tell(folder: str, message: EngineGone) -> None:
        messages.append((folder, message.reason))
        server.exit_code = 0

    tree.api_servers.notify = tell
    tree.events.queue.put(engine)
    tree.wait_for_api_servers(30, keep_engines=True)
    assert messages == [("here", "it died too often"), ("there", "it died too often")]


def test_who_has_ended_in_a_drain_is_not_hung(tree, monkeypatch):
    """Its process id may be another's by now."""
    monkeypatch.setattr(events, "LOOK_INTERVAL", 0.0)
    killed: list[str] = []
    gone, slow = (
        SimpleNamespace(name=name, exit_code=code, kill_hung=lambda name=name: killed.append(name))
        for name, code in (("api-0", 0), ("api-1", None))
    )
    tree.api_servers.processes = [gone, slow]
    for child in tree.api_servers.processes:
        heartbeat = Heartbeat()
        heartbeat.get_ready()
        tree.api_servers.watches[child.name] = Watchdog(heartbeat, interval=1.0, timeout=3.0)
    tree.wait_for_api_servers(0.1, keep_engines=False)
    assert killed and {*killed} == {"api-1"}


def test_tls_begins_and_ends_only_with_a_restart(tree, reader, tmp_path: Path, caplog):
    file = tmp_path / "cert.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(file))
    reader.options |= {"ssl_certfile": str(file), "log_level": "debug"}
    tree.reload()
    assert "--ssl-certfile: only a restart can turn TLS on or off: nothing changed" in caplog.text
    assert "SIGHUP: read keys" not in caplog.text
    assert tree.config.observability.log_level == "info" and not tree.config.access.ssl_certfile
    tree.config = tree.config.replace(ssl_certfile=str(file))
    del reader.options["ssl_certfile"]
    caplog.clear()
    tree.reload()
    assert "nothing changed" in caplog.text and tree.config.access.ssl_certfile


@pytest.mark.parametrize("text", ["", "# nobody", "expired"])
def test_a_file_of_no_valid_keys_does_not_replace_the_keys(tree, reader, tmp_path, caplog, text):
    file = tmp_path / "keys.toml"
    reader.options |= {"api_key_file": str(file), "log_level": "debug"}
    entry = f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\n'
    file.write_text(entry + "expires = 2020-01-01T00:00:00Z" if text == "expired" else text)
    tree.reload()
    assert "has no valid key" in caplog.text and "nothing changed" in caplog.text
    assert tree.config.observability.log_level == "info"
    file.write_text(entry)
    tree.reload()
    assert tree.config.observability.log_level == "debug"


def test_adapters_are_read_again(tmp_path: Path, caplog):
    def entries(**seeds: int) -> list[str]:
        return [f"{name}={write_adapter(tmp_path / name, seed)}" for name, seed in seeds.items()]

    reader = Reader()
    reader.options = {"enable_lora": True, "max_lora_rank": 8}
    reader.options["lora_modules"] = entries(a=1, b=2)
    tree = ProcessTree(reader(), FAKE_SPEC, {}, str(tmp_path / "ipc"), None, reader)
    store = AdapterStore.beside(str(tmp_path / "ipc"))
    store.load("c", str(write_adapter(tmp_path / "other", 3)), 8, {})  # by a route
    before = {name: adapter.digest for name, adapter in store.read_adapters().items()}

    reader.options["lora_modules"] = entries(a=4, d=5)
    tree.reload()
    after = {name: adapter.digest for name, adapter in store.read_adapters().items()}
    assert after.keys() == {"a", "c", "d"}
    assert after["a"] != before["a"] and after["c"] == before["c"]
    assert [entry.partition("=")[0] for entry in tree.config.lora.lora_modules] == ["a", "d"]

    reader.options["lora_modules"] = [*entries(a=6), f"e={tmp_path / 'nowhere'}"]
    tree.reload()
    assert "nothing changed" in caplog.text
    assert {name: adapter.digest for name, adapter in store.read_adapters().items()} == after


def test_an_api_server_with_a_blocked_loop_is_killed(tree, monkeypatch, caplog):
    monkeypatch.setattr(events, "LOOK_INTERVAL", 0.0)

    class Child:
        def __init__(self, name: str) -> None:
            self.name, self.heartbeat, self.exit_code = name, Heartbeat(), None
            self.heartbeat.get_ready()
            tree.api_servers.watches[name] = Watchdog(self.heartbeat, interval=1.0, timeout=3.0)

        def kill_hung(self) -> None:
            tree.events.queue.put(self)

    working, hung = Child("api-0"), Child("api-1")
    tree.api_servers.processes = [working, hung]
    look = Watchdog.look

    def look_and_beat(self: Watchdog) -> str | None:
        working.heartbeat.beat()
        return look(self)

    monkeypatch.setattr(Watchdog, "look", look_and_beat)
    assert tree.events.wait(tree.watch) is hung
    assert "api-1: hung: it has shown no sign of life for 4 s" in caplog.text


def test_a_replaced_api_server_does_not_wait_for_an_engine(tree, monkeypatch, tmp_path):
    """Unless none was ever ready: its socket goes with it."""
    started: list[bool] = []
    servers = tree.api_servers
    monkeypatch.setattr(servers, "start_process", lambda name, waits: started.append(waits))
    servers.hands_over, servers.ipc_dir, servers.folders = True, str(tmp_path), [str(tmp_path)]
    for were_ready in (False, True):
        child = SimpleNamespace(name="api-0", exit_code=-9, stop=lambda timeout: None)
        inbox = tmp_path / "client-7"
        servers.processes, servers.clients = [child], {"api-0": 7}
        servers.outboxes = {inbox: SimpleNamespace(close=lambda: None)}
        for name in ("client-7", "api-7", "api-8"):
            (tmp_path / name).touch()
        servers.engines = SimpleNamespace(were_ready=were_ready, detach=lambda *_: None)
        assert servers.replace(child) is None
        assert {path.name for path in tmp_path.iterdir()} == {"api-8"}
    assert started == [True, False]
