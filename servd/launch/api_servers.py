"""APIServerProcessManager: starts, watches and replaces the API servers of `servd serve`."""

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from servd.checkpoint import model_spec
from servd.config import AccessConfig, Config
from servd.ipc import channels as ipc
from servd.ipc.child import Child
from servd.ipc.heartbeat import Heartbeat, Watchdog, make_file
from servd.ipc.start_messages import ENGINE_IS_DEAD, StartAPIServer
from servd.launch.core_engines import CoreEngineProcManager
from servd.launch.engine_supervisor import LOOK_INTERVAL, Deaths, EngineMessage, newest_engine
from servd.messages.engine import EngineGone

logger = logging.getLogger("servd.launch")

API_MODULE = "servd.api.server"

API_HANG_TIMEOUT = 60.0  # seconds that the event loop of an API server may be blocked
API_STOP_TIMEOUT = 3.0  # seconds from the (second) SIGTERM to SIGKILL


def url_of(listener: socket.socket, access: AccessConfig) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if access.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(eq=False)
class APIServerProcessManager:
    """The API servers, which share `listener`: the kernel gives each connection to one of them."""

    config: Config
    spec: model_spec.ModelSpec
    reasons: dict[str, str]  # why options that servd chose have their values
    ipc_dir: str
    folders: Sequence[str]  # of each engine's sockets
    listener: socket.socket | None  # None: there are no API servers
    engines: CoreEngineProcManager
    on_exit: Callable[[Child], None]
    hands_over: bool  # whether another process tree may accept from the same socket

    def __post_init__(self) -> None:
        self.processes: list[Child] = []
        self.deaths = Deaths(self.config.server)
        self.outboxes: dict[Path, ipc.Outbox] = {}  # by their sockets
        self.clients: dict[str, int] = {}  # numbers by name
        self.watches: dict[str, Watchdog] = {}  # by name
        self.metrics_dir: str | None = None

    def start(self) -> None:
        if self.listener is None:
            return
        logger.info("listening on %s", url_of(self.listener, self.config.access))
        count = self.config.server.api_server_count
        if count > 1:  # each server must be able to answer /metrics for all
            self.metrics_dir = tempfile.mkdtemp(prefix="metrics-", dir=self.ipc_dir)
        for place in range(count):
            self.processes.append(self.start_process(f"api-{place}", self.hands_over))

    def start_process(self, name: str, waits: bool) -> Child:
        """Start an API server. With `waits`, it accepts connections only when the engine is ready,
        because another process tree accepts them meanwhile.
        """
        assert self.listener is not None
        # Random, as API servers of several launchers may attach to one engine.
        client = secrets.randbits(31)
        for inbox in self._inboxes(client):
            self.outboxes[inbox] = ipc.Outbox(f"ipc://{inbox}")  # messages wait for its start
        heartbeat = make_file()
        heart = Heartbeat(heartbeat)
        generations = [engine.number for engine in self.engines.supervisors]
        if self.config.server.attach:
            generations = [newest_engine(folder) for folder in self.folders]
        start = StartAPIServer(
            self.config,
            self.spec,
            self.reasons,
            self.ipc_dir,
            client,
            name,
            self.listener.fileno(),
            url_of(self.listener, self.config.access) if name == "api-0" else None,
            generations,
            self.hands_over,
            waits,
            heartbeat,
        )
        env = {"PROMETHEUS_MULTIPROC_DIR": self.metrics_dir} if self.metrics_dir else {}
        descriptors = [self.listener.fileno(), heartbeat]
        child = Child(name, API_MODULE, start, descriptors, env)
        os.close(heartbeat)
        self.clients[name] = client
        self.watches[name] = Watchdog(
            heart, LOOK_INTERVAL, API_HANG_TIMEOUT, child.is_stopped, child.cpu_waits
        )
        child.on_exit(self.on_exit)
        return child

    def _inboxes(self, client: int) -> list[Path]:
        return [Path(folder, f"client-{client}") for folder in self.folders]

    @property
    def are_running(self) -> bool:
        return any(child.exit_code is None for child in self.processes)

    def watch(self) -> None:
        """Kill hung API servers."""
        for child in self.processes:
            if child.exit_code is not None:  # its process id may be another's
                continue
            if reason := self.watches[child.name].look():
                logger.error("%s: hung: %s: its stacks follow", child.name, reason)
                child.kill_hung()

    def replace(self, child: Child) -> str | None:
        """Restart an API server. Return the reason if it is not restarted, else None."""
        reason = f"{child.name} ended unexpectedly with code {child.exit_code}"
        if child.exit_code in (ENGINE_IS_DEAD, 2) or self.deaths.add():
            return reason
        logger.error("%s: restarting it", reason)
        child.stop(0)  # closes its pipe
        client = self.clients[child.name]
        for inbox in self._inboxes(client):
            self.engines.detach(client, f"ipc://{inbox}")
            self.outboxes.pop(inbox).close()
            inbox.unlink(missing_ok=True)
        Path(self.ipc_dir, f"api-{client}").unlink(missing_ok=True)
        if self.metrics_dir is not None:  # files of its gauges
            for path in Path(self.metrics_dir).glob(f"gauge_live*_{child.process.pid}.db"):
                path.unlink()
        waits = self.hands_over and not self.engines.were_ready
        place = self.processes.index(child)
        self.processes[place] = self.start_process(child.name, waits)
        return None

    def notify_gone(self, reason: str) -> None:
        """Report that no engine will be restarted."""
        for folder in self.folders:
            self.notify(folder, EngineGone(reason))

    def set_config(self, config: Config) -> None:
        self.config = config
        for child in self.processes:
            child.post(config)

    def notify(self, folder: str, message: EngineMessage) -> None:
        """Send a message about a folder's engine to all API servers, including attached ones."""
        for inbox, outbox in self.outboxes.items():
            if inbox.parent == Path(folder):
                outbox.send(message)
        if self.config.server.attach:
            return
        for inbox in {*Path(folder).glob("client-*")} - self.outboxes.keys():
            outbox = ipc.Outbox(f"ipc://{inbox}")
            outbox.send(message)
            outbox.close()

    def finish_requests(self) -> None:
        """Accept no more connections, and end after the open requests."""
        if self.listener is not None:
            self.listener.close()  # else new connections would wait in vain
        for child in self.processes:
            child.terminate()

    def stop(self) -> None:
        for child in self.processes:
            child.terminate()
        for child in self.processes:
            child.stop(API_STOP_TIMEOUT)

    def remove_metrics(self) -> None:
        if self.metrics_dir is not None:
            shutil.rmtree(self.metrics_dir, ignore_errors=True)
