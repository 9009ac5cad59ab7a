"""ProcessTree: starts, restarts and stops the processes of `servd serve`."""

import logging
import math
import os
import queue
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from types import FrameType

import msgspec

from servd.api.engine import load_balancer as routing
from servd.base import log
from servd.base.errors import ConfigError
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.lora import AdapterFiles, parse_module
from servd.checkpoint.model_spec import ModelSpec
from servd.config import AccessConfig, Config
from servd.config.data_parallel import Decision
from servd.config.keys import check_new_keys, read_keys, tls_context
from servd.core.client import engine_dir
from servd.ipc import channels as ipc
from servd.ipc.child import Child
from servd.ipc.heartbeat import Heartbeat, Watchdog, make_file
from servd.ipc.start_messages import ENGINE_IS_DEAD, StartAPIServer
from servd.launch.bridge import Bridge
from servd.launch.engine_supervisor import LOOK_INTERVAL, Deaths, EngineSupervisor, newest_engine
from servd.messages.engine import STALLED, EngineDead, EngineRestarting, EngineStatus

logger = logging.getLogger("servd.launch")

# What the main thread waits for: a child that has ended, a signal, or a function to call.
Event = Child | signal.Signals | Callable[[], None]

API_MODULE = "servd.api.server"

API_HANG_TIMEOUT = 60.0  # seconds that the event loop of an API server may be blocked
DEATH_GRACE = 1.0  # seconds for API servers to answer open requests when the engine is dead
API_STOP_TIMEOUT = 3.0  # seconds from the (second) SIGTERM to SIGKILL
ENGINE_STOP_TIMEOUT = 3.0  # the same for the engine


def check_access(access: AccessConfig) -> None:
    """Raise ConfigError if a file of keys or certificates cannot be read."""
    read_keys(access)
    tls_context(access)


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def url_of(listener: socket.socket, access: AccessConfig) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if access.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(eq=False)
class ProcessTree:
    config: Config
    spec: ModelSpec
    decided: InitVar[dict[str, Decision]]
    ipc_dir: str
    listener: socket.socket | None  # handed to every API server
    started_at: float
    read_config: Callable[[], Config]

    def __post_init__(self, decided: dict[str, Decision]) -> None:
        config = self.config
        self.had_terminal = has_terminal()
        self.reasons = {name: decision.why for name, decision in decided.items()}
        self.hands_over = False  # whether another tree may accept from the same socket
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.reload_is_due = False
        self.engines: list[EngineSupervisor] = []  # by rank; none with --attach
        size = config.parallel.data_parallel_size
        # Folders of the engines' sockets, by rank.
        self.folders = [engine_dir(self.ipc_dir, rank) for rank in range(size)]
        self.routing = routing.make_file() if size > 1 else -1
        self.bridge: Bridge | None = None  # if there are engines on other hosts
        self.api_servers: list[Child] = []
        self.api_deaths = Deaths(config.server)
        self.outboxes: dict[Path, ipc.Outbox] = {}  # to our API servers, by their sockets
        self.clients: dict[str, int] = {}  # numbers of our API servers by name
        self.watches: dict[str, Watchdog] = {}  # API servers by name
        self.metrics_dir: str | None = None
        self.adapters: set[str] = set()  # names of the adapters in --lora-modules

    def start(self) -> None:
        """Start the children. Raise ConfigError if an adapter of --lora-modules is not valid."""
        if not self.config.server.attach:
            AdapterStore.beside(self.ipc_dir).clear()
            modules = self.load_adapters(self.config.lora.lora_modules)
            self.config = self.config.replace(lora_modules=modules)
        if not self.config.server.attach:
            self.make_engines()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Ray has set some
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                signal.signal(signum, self.on_signal)
        if self.listener is not None:
            logger.info("listening on %s", url_of(self.listener, self.config.access))
            count = self.config.server.api_server_count
            if count > 1:  # each server must be able to answer /metrics for all
                self.metrics_dir = tempfile.mkdtemp(prefix="metrics-", dir=self.ipc_dir)
            self.api_servers = [
                self.start_api_server(f"api-{i}", self.hands_over) for i in range(count)
            ]
        for engine in self.engines:
            engine.start(self.started_at)

    def make_engines(self) -> None:
        """Create the supervisors of this host's engines, then of the engines that Ray places."""
        num_here = self.config.parallel.num_engines_here
        for place, folder in enumerate(self.folders):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if place < num_here:
                engine = EngineSupervisor(
                    self.config, self.spec, folder, self.events.put, place, self.tell_stalled
                )
            else:
                from servd.launch.ray_engine import RayEngineSupervisor, start_bridge

                if self.bridge is None:
                    self.bridge = start_bridge(self.fail)
                engine = RayEngineSupervisor(
                    self.config, self.spec, folder, self.events.put, place, bridge=self.bridge
                )
            self.engines.append(engine)

    def fail(self, error: Exception) -> None:
        """Make this process end with `error`. Call this from another thread."""

        def give_up() -> None:
            raise error

        self.events.put(give_up)

    def load_adapters(self, entries: Sequence[str]) -> list[str]:
        """Copy the adapters of --lora-modules, so that a restarted engine finds them unchanged.
        Unload adapters that were removed from the option. Return the entries for the copies. Raise
        ConfigError, and change nothing, if an adapter is not valid.
        """
        store = AdapterStore.beside(self.ipc_dir)
        max_rank = self.config.lora.max_lora_rank
        sources = dict(map(parse_module, entries))
        for source in sources.values():
            AdapterFiles(source).check(max_rank, {})
        loaded = [store.load(name, source, max_rank, {}) for name, source in sources.items()]
        for name in self.adapters - sources.keys():
            store.unload(name)
        self.adapters = {*sources}
        return [f"{adapter.name}={adapter.folder}" for adapter in loaded]

    def start_api_server(self, name: str, waits: bool) -> Child:
        """Start an API server and return its process. The servers share the listening socket: the
        kernel gives each connection to one server. With `waits`, the server accepts connections
        only when the engine is ready, because another process tree accepts them meanwhile.
        """
        assert self.listener is not None
        # Random, as API servers of several launchers may attach to one engine.
        client = secrets.randbits(31)
        for inbox in self.inboxes(client):
            self.outboxes[inbox] = ipc.Outbox(f"ipc://{inbox}")  # messages wait for its start
        heartbeat = make_file()
        heart = Heartbeat(heartbeat)
        start = StartAPIServer(
            self.config,
            self.spec,
            self.reasons,
            self.ipc_dir,
            client,
            name,
            self.listener.fileno(),
            url_of(self.listener, self.config.access) if name == "api-0" else None,
            self.generations(),
            self.hands_over,
            waits,
            heartbeat,
            place=int(name.rpartition("-")[2]),
            routing=self.routing,
        )
        env = {"PROMETHEUS_MULTIPROC_DIR": self.metrics_dir} if self.metrics_dir else {}
        descriptors = [self.listener.fileno(), heartbeat]
        descriptors += [self.routing] if self.routing >= 0 else []
        child = Child(name, API_MODULE, start, descriptors, env)
        os.close(heartbeat)
        self.clients[name] = client
        self.watches[name] = Watchdog(heart, LOOK_INTERVAL, API_HANG_TIMEOUT, child.is_stopped)
        child.on_exit(self.events.put)
        return child

    def generations(self) -> list[int]:
        """Return the engines' generations, by rank, for a new API server."""
        if self.config.server.attach:
            return [newest_engine(folder) for folder in self.folders]
        return [engine.number for engine in self.engines]

    def inboxes(self, client: int) -> list[Path]:
        return [Path(folder, f"client-{client}") for folder in self.folders]

    def engine_of(self, event: Event) -> EngineSupervisor | None:
        return next((engine for engine in self.engines if engine.child is event), None)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Queue the signal. SimpleQueue.put is safe in a signal handler."""
        if signum == signal.SIGHUP:
            if self.reload_is_due:
                return
            self.reload_is_due = True
        self.events.put(signal.Signals(signum))

    def ends(self, event: Event) -> bool:
        """Return whether an event is a signal to end. SIGHUP is one if the terminal is gone."""
        if event is signal.SIGHUP:
            return self.had_terminal and not has_terminal()
        return isinstance(event, signal.Signals)

    def watch(self) -> int:
        """Keep the children alive until a signal or a failed restart. Return the exit code."""
        while True:
            event = self.next_event()
            assert event is not None
            if event is signal.SIGHUP and not self.ends(event):
                self.reload()
                continue
            if isinstance(event, signal.Signals):
                seconds = self.config.server.shutdown_timeout
                logger.info(
                    "%s: finishing open requests, at most %g s; a second one stops at once",
                    event.name,
                    seconds,
                )
                self.drain()
                return 0
            engine = self.engine_of(event)
            why = self.replace_engine(engine) if engine else self.replace_api_server(event)
            if why is not None:
                break
        code = 2 if event.exit_code == 2 else 1  # 2: a ConfigError, which the child has printed
        if code == 1:
            logger.error("%s: stopping", why)
        for folder in self.folders:
            self.notify(folder, EngineDead(why))
        self.wait_for_api_servers(DEATH_GRACE)
        return code

    def reload(self) -> None:
        self.reload_is_due = False
        try:
            new = self.read_config().with_absolute_paths()
            check_new_keys(new.access)
            tls_context(new.access)
            if (new.access.ssl_certfile is None) != (self.config.access.ssl_certfile is None):
                raise ConfigError("--ssl-certfile: only a restart can turn TLS on or off")
            if self.config.lora.enable_lora and not self.config.server.attach:
                modules = self.load_adapters(new.lora.lora_modules)
                self.config = self.config.replace(lora_modules=modules)
        except ConfigError as error:
            logger.error("SIGHUP: %s: nothing changed", error)
            return
        log.set_level(new.observability)
        self.config = self.config.replace(
            log_level=new.observability.log_level, **msgspec.structs.asdict(new.access)
        )
        for engine in self.engines:
            engine.config = self.config
        for child in [*self.api_servers, *(engine.child for engine in self.engines)]:
            if child is not None:
                child.post(self.config)
        logger.info("SIGHUP: read keys, limits, certificates, log level and adapters again")

    def next_event(self, deadline: float = math.inf) -> Child | signal.Signals | None:
        """Return the next child that ended, or the next signal. Check for hung children meanwhile.
        Return None after the deadline, on the monotonic clock.
        """
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                event = self.events.get(timeout=min(LOOK_INTERVAL, left))
                if not callable(event):
                    return event
                event()
            except queue.Empty:
                if not left:
                    return None
                for engine in self.engines:
                    engine.look()
                for child in self.api_servers:
                    is_there = child.exit_code is None
                    if is_there and (reason := self.watches[child.name].look()):
                        logger.error("%s: hung: %s: its stacks follow", child.name, reason)
                        child.kill_hung()

    def replace_engine(self, engine: EngineSupervisor) -> str | None:
        """Restart an engine. Return the reason if it is not restarted, else None."""
        died_at = time.monotonic()
        if (why := engine.handle_exit()) is not None:
            return why
        logger.error("%s: restarting it", engine.reason)
        self.notify(engine.ipc_dir, engine.next_generation())
        engine.start(died_at)
        return None

    def replace_api_server(self, child: Child) -> str | None:
        """Restart an API server. Return the reason if it is not restarted, else None."""
        reason = f"{child.name} ended unexpectedly with code {child.exit_code}"
        if child.exit_code in (ENGINE_IS_DEAD, 2) or self.api_deaths.add():
            return reason
        logger.error("%s: restarting it", reason)
        child.stop(0)  # closes its pipe
        client = self.clients[child.name]
        for inbox in self.inboxes(client):
            if self.bridge is not None:
                self.bridge.detach(client, f"ipc://{inbox}")
            self.outboxes.pop(inbox).close()
            inbox.unlink(missing_ok=True)
        Path(self.ipc_dir, f"api-{client}").unlink(missing_ok=True)
        if self.metrics_dir is not None:  # files of its gauges
            for path in Path(self.metrics_dir).glob(f"gauge_live*_{child.process.pid}.db"):
                path.unlink()
        waits = self.hands_over and not all(engine.was_ready for engine in self.engines)
        place = self.api_servers.index(child)
        self.api_servers[place] = self.start_api_server(child.name, waits)
        return None

    def tell_stalled(self, engine: EngineSupervisor) -> None:
        """Report to API servers that an engine hangs, until it is restarted."""
        self.notify(engine.ipc_dir, EngineStatus(STALLED, 0.0, engine.number))

    def notify(self, folder: str, message: EngineDead | EngineRestarting | EngineStatus) -> None:
        """Send a message about a folder's engine to all API servers, including attached ones."""
        for inbox, outbox in self.outboxes.items():
            if inbox.parent == Path(folder):
                outbox.send(message)
        others = {*Path(folder).glob("client-*")} if self.engines else {*()}
        for inbox in others - self.outboxes.keys():
            outbox = ipc.Outbox(f"ipc://{inbox}")
            outbox.send(message)
            outbox.close()

    def drain(self) -> None:
        """Make the API servers finish open requests; wait for them, or until a second signal."""
        if self.listener is not None:
            self.listener.close()  # else new connections would wait in vain
        for child in self.api_servers:
            child.terminate()
        # The API servers apply the timeout themselves; add one second for their exit.
        self.wait_for_api_servers(self.config.server.shutdown_timeout + 1, self.replace_engine)

    def wait_for_api_servers(
        self, timeout: float, replace: Callable[[EngineSupervisor], str | None] | None = None
    ) -> None:
        """Wait until all API servers have ended, for `timeout` seconds, or until a signal to end.
        `replace` restarts an engine that dies meanwhile, because open requests need the engine. If
        an engine exits with 0, return at once: it was stopped together with this process, e.g. by
        systemd.
        """
        deadline = time.monotonic() + timeout
        while any(child.exit_code is None for child in self.api_servers):
            event = self.next_event(deadline)
            if event is None or self.ends(event):
                return
            engine = self.engine_of(event)
            if engine is None or engine.child is None or replace is None:
                continue
            if not engine.child.exit_code:
                return
            if (why := replace(engine)) is not None:
                logger.error("%s: stopping", why)
                for folder in self.folders:
                    self.notify(folder, EngineDead(why))
                replace = None

    def stop(self) -> None:
        """Stop all children. API servers stop first, because they need the engines."""
        for child in self.api_servers:
            child.terminate()
        for child in self.api_servers:
            child.stop(API_STOP_TIMEOUT)
        for engine in self.engines:
            self.notify(engine.ipc_dir, EngineDead("the engine was stopped"))  # to attached servers
            engine.terminate()
        for engine in self.engines:
            engine.stop(ENGINE_STOP_TIMEOUT)
        if self.bridge is not None:
            self.bridge.close()
        if self.metrics_dir is not None:
            shutil.rmtree(self.metrics_dir, ignore_errors=True)
