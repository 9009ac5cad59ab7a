"""The tree of processes of `servd serve`: what is done when one of them, or it, has to end."""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from servd import hf, ipc, log
from servd.access import read_keys, tls_context
from servd.adapter_store import AdapterStore
from servd.api import routing
from servd.child import Child
from servd.child_messages import ENGINE_IS_DEAD, StartAPIServer
from servd.config import AccessConfig, Config
from servd.core.client import engine_address, engine_dir
from servd.errors import ConfigError
from servd.heartbeat import Heartbeat, Watchdog, make_file
from servd.ipc import Keys, tcp_address
from servd.join import read_token, terms_of
from servd.launch.engine_supervisor import LOOK_INTERVAL, Deaths, EngineSupervisor, newest_engine
from servd.lora import AdapterFiles, parse_module
from servd.messages import EngineDead, EngineRestarting
from servd.relay import Addresses, Head
from servd.resolve import Decision

logger = logging.getLogger("servd.launch")

# What the main thread waits for: a child that has ended, a signal, or something for it to do.
Event = Child | signal.Signals | Callable[[], None]

API_MODULE = "servd.api.server"

API_PATIENCE = 60.0  # seconds for which the event loop of an API server may stand still
DEATH_GRACE = 1.0  # seconds that API servers get to answer open requests after the engine died
API_STOP_TIMEOUT = 3.0  # seconds from SIGTERM, the second one at that, to SIGKILL
ENGINE_STOP_TIMEOUT = 3.0  # the same for the engine


def check_access(access: AccessConfig) -> None:
    """Check that the files of keys and certificates can be read.

    Raises:
        ConfigError: one cannot.
    """
    read_keys(access)
    tls_context(access)


def has_terminal() -> bool:
    """Whether this process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def url_of(listener: socket.socket, access: AccessConfig) -> str:
    """What a person types to reach the server."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if access.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def head_address(config: Config) -> str:
    """Where hosts join that of the API servers."""
    parallel = config.parallel
    return tcp_address(parallel.data_parallel_address or "", parallel.data_parallel_rpc_port)


def addresses_of(folders: Mapping[int, str]) -> Addresses:
    """Those in the folders of engines, by rank."""
    return Addresses(
        lambda rank, number: engine_address(folders[rank], number),
        lambda rank, client: ipc.address(folders[rank], f"client-{client}"),
    )


@dataclass(eq=False)
class ProcessTree:
    """This process's children, and what happens when one of them, or it, has to end."""

    config: Config
    spec: hf.ModelSpec
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
        # For their sockets, by rank.
        self.folders = [engine_dir(self.ipc_dir, rank) for rank in range(size)]
        self.routing = routing.make_file() if size > 1 else -1
        self.head: Head | None = None  # if there are engines on other hosts
        self.elsewhere: dict[int, int] = {}  # their incarnations by rank
        self.api_servers: list[Child] = []
        self.api_deaths = Deaths(config.server)
        self.outboxes: dict[Path, ipc.Outbox] = {}  # to our API servers, by their sockets
        self.clients: dict[str, int] = {}  # numbers of our API servers by name
        self.watches: dict[str, Watchdog] = {}  # API servers by name
        self.metrics_dir: str | None = None
        self.adapters: set[str] = set()  # names of those in --lora-modules

    def start(self) -> None:
        """Start the children.

        Raises:
            ConfigError: an adapter of --lora-modules cannot be served.
        """
        if not self.config.server.attach:
            AdapterStore.beside(self.ipc_dir).clear()
            modules = self.load_adapters(self.config.lora.lora_modules)
            self.config = self.config.replace(lora_modules=modules)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                signal.signal(signum, self.on_signal)
        if not self.config.server.attach:
            self.make_engines()
        if self.listener is not None:
            logger.info("listening on %s", url_of(self.listener, self.config.access))
            count = self.config.server.api_server_count
            if count > 1:  # each of them must be able to answer /metrics for all
                self.metrics_dir = tempfile.mkdtemp(prefix="metrics-", dir=self.ipc_dir)
            self.api_servers = [
                self.start_api_server(f"api-{i}", self.hands_over) for i in range(count)
            ]
        for engine in self.engines:
            engine.start(self.started_at)

    def make_engines(self) -> None:
        """Those of this host, which come first, and the way to those of others.

        Raises:
            ConfigError: others cannot join.
        """
        num_here = self.config.parallel.num_engines_here
        for place, folder in enumerate(self.folders):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if place < num_here:
                one = EngineSupervisor(self.config, self.spec, folder, self.events.put, place)
                self.engines.append(one)
            else:
                self.elsewhere[place] = 0
        if self.elsewhere:
            self.head = Head(
                head_address(self.config), self.elsewhere,
                addresses_of(dict(enumerate(self.folders))),
                partial(terms_of, self.config, self.spec), Keys(read_token(self.config)),
                lambda *lost: self.events.put(partial(self.lose_engine, *lost)), self.fail,
            )  # fmt: skip
            self.head.start()

    def lose_engine(self, rank: int, restarting: EngineRestarting) -> None:
        """That of another host; it may join again."""
        self.elsewhere[rank] = restarting.incarnation
        self.tell(self.folders[rank], restarting)

    def fail(self, error: Exception) -> None:
        """Called from a thread that cannot go on, without which nothing can."""

        def give_up() -> None:
            raise error

        self.events.put(give_up)

    def load_adapters(self, entries: Sequence[str]) -> list[str]:
        """--lora-modules, of copies that stay what they are when the engine is started again; those
        that the option had before and has no more are gone.

        Raises:
            ConfigError: one cannot be served, and nothing has changed.
        """
        store, max_rank = AdapterStore.beside(self.ipc_dir), self.config.lora.max_lora_rank
        sources = dict(map(parse_module, entries))
        for source in sources.values():
            AdapterFiles(source).check(max_rank, {})
        loaded = [store.load(name, source, max_rank, {}) for name, source in sources.items()]
        for name in self.adapters - sources.keys():
            store.unload(name)
        self.adapters = {*sources}
        return [f"{adapter.name}={adapter.folder}" for adapter in loaded]

    def start_api_server(self, name: str, waits: bool) -> Child:
        """One of them; the kernel hands each connection of their shared socket to one.

        Args:
            name: for the log.
            waits: until the engine is ready, it leaves connections to another tree.
        """
        assert self.listener is not None
        # A random number rather than an index: servers of several launchers may attach to one
        # engine.
        client = secrets.randbits(31)
        for inbox in self.inboxes(client):
            self.outboxes[inbox] = ipc.Outbox(f"ipc://{inbox}")  # what is sent waits for its start
        heartbeat = make_file()
        self.watches[name] = Watchdog(Heartbeat(heartbeat), LOOK_INTERVAL, API_PATIENCE)
        start = StartAPIServer(
            self.config,
            self.spec,
            self.reasons,
            self.ipc_dir,
            client,
            name,
            self.listener.fileno(),
            url_of(self.listener, self.config.access) if name == "api-0" else None,
            self.incarnations(),
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
        child.on_exit(self.events.put)
        return child

    def incarnations(self) -> list[int]:
        """Of the engines, by rank, that a new API server is to attach to."""
        if self.config.server.attach:
            return [newest_engine(folder) for folder in self.folders]
        return [*(engine.number for engine in self.engines), *self.elsewhere.values()]

    def inboxes(self, client: int) -> list[Path]:
        """Where an API server hears of each engine."""
        return [Path(folder, f"client-{client}") for folder in self.folders]

    def engine_of(self, event: Event) -> EngineSupervisor | None:
        """The engine whose process that is."""
        return next((engine for engine in self.engines if engine.child is event), None)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handlers only leave a note; SimpleQueue.put is allowed in one."""
        if signum == signal.SIGHUP:
            if self.reload_is_due:
                return
            self.reload_is_due = True
        self.events.put(signal.Signals(signum))

    def ends(self, event: Event) -> bool:
        """Whether it is a signal to end; the hang-up of a terminal ends what was started in it."""
        if event is signal.SIGHUP:
            return self.had_terminal and not has_terminal()
        return isinstance(event, signal.Signals)

    def watch(self) -> int:
        """Keep the children alive until a signal, or until that is given up; return the exit
        code.
        """
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
            self.tell(folder, EngineDead(why))
        self.wait_for_api_servers(DEATH_GRACE)
        return code

    def reload(self) -> None:
        """Read again what may change while the server runs, and have the children take it over."""
        self.reload_is_due = False
        try:
            new = self.read_config()
            check_access(new.access)
            if (new.access.ssl_certfile is None) != (self.config.access.ssl_certfile is None):
                raise ConfigError("--ssl-certfile: TLS begins and ends only with a restart")
            if self.config.lora.enable_lora and not self.config.server.attach:
                modules = self.load_adapters(new.lora.lora_modules)
                self.config = self.config.replace(lora_modules=modules)
        except ConfigError as error:
            logger.error("SIGHUP: %s: nothing has changed", error)
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
        logger.info("SIGHUP: keys, limits, certificates, log level and adapters were read again")

    def next_event(self, deadline: float = math.inf) -> Child | signal.Signals | None:
        """Wait for a child's end or a signal; look at the others and do what is to be done
        meanwhile. None after the deadline, on the monotonic clock.
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
        """Start another one, to which API servers turn with all that the last had; or why not."""
        died_at = time.monotonic()
        if (why := engine.handle_exit()) is not None:
            return why
        logger.error("%s: starting it again", engine.reason)
        self.tell(engine.ipc_dir, engine.next_incarnation())
        engine.start(died_at)
        return None

    def replace_api_server(self, child: Child) -> str | None:
        """Start another API server in place of one that is gone; or why not."""
        reason = f"{child.name} ended unexpectedly with code {child.exit_code}"
        if child.exit_code in (ENGINE_IS_DEAD, 2) or self.api_deaths.add():
            return reason
        logger.error("%s: starting it again", reason)
        child.stop(0)  # closes its pipe
        client = self.clients[child.name]
        if self.head:
            self.head.drop(client)
        for inbox in self.inboxes(client):
            self.outboxes.pop(inbox).close()
            inbox.unlink(missing_ok=True)
        Path(self.ipc_dir, f"api-{client}").unlink(missing_ok=True)
        if self.metrics_dir is not None:  # gauges count what lives
            for path in Path(self.metrics_dir).glob(f"gauge_live*_{child.process.pid}.db"):
                path.unlink()
        waits = self.hands_over and not all(engine.was_ready for engine in self.engines)
        place = self.api_servers.index(child)
        self.api_servers[place] = self.start_api_server(child.name, waits)
        return None

    def tell(self, folder: str, message: EngineDead | EngineRestarting) -> None:
        """Send to all API servers as the engine of a folder: to those that attached to it, too."""
        for inbox, outbox in self.outboxes.items():
            if inbox.parent == Path(folder):
                outbox.send(message)
        others = {*Path(folder).glob("client-*")} if self.engines else {*()}
        for inbox in others - self.outboxes.keys():
            outbox = ipc.Outbox(f"ipc://{inbox}")
            outbox.send(message)
            outbox.close()

    def drain(self) -> None:
        """Let the API servers finish their open requests; a second signal cuts this short."""
        if self.listener is not None:
            self.listener.close()  # else connections would wait for servers that take no more
        for child in self.api_servers:
            child.terminate()
        # The API servers keep to the timeout themselves; the extra second is for their exit.
        self.wait_for_api_servers(self.config.server.shutdown_timeout + 1, self.replace_engine)

    def wait_for_api_servers(
        self, timeout: float, replace: Callable[[EngineSupervisor], str | None] | None = None
    ) -> None:
        """Until all have ended, `timeout` seconds are over, or a signal to end arrives.

        Args:
            timeout: seconds.
            replace: starts an engine that dies meanwhile again, as open requests need it, or says
                why not. One that ends in order was told to with this process (by systemd, say): the
                rest is cut.
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
                    self.tell(folder, EngineDead(why))
                replace = None

    def stop(self) -> None:
        """End whatever still runs: the API servers first, which need the engine to the end."""
        for child in self.api_servers:
            child.terminate()
        for child in self.api_servers:
            child.stop(API_STOP_TIMEOUT)
        if self.head:
            self.head.close()
        for engine in self.engines:
            self.tell(engine.ipc_dir, EngineDead("the engine was stopped"))  # to those of others
            engine.terminate()
        for engine in self.engines:
            engine.stop(ENGINE_STOP_TIMEOUT)
        if self.metrics_dir is not None:
            shutil.rmtree(self.metrics_dir, ignore_errors=True)
