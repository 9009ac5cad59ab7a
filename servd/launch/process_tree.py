"""ProcessTree: keeps the engines and API servers of `servd serve` alive until a signal."""

import logging
import math
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from types import FrameType

import msgspec

from servd.base import log
from servd.base.errors import ConfigError
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.lora import AdapterFiles, parse_module
from servd.checkpoint.model_spec import ModelSpec
from servd.config import AccessConfig, Config
from servd.config.data_parallel import Decision
from servd.config.keys import check_new_keys, read_keys, tls_context
from servd.core.client import engine_dir
from servd.ipc.child import Child
from servd.launch.api_servers import APIServerProcessManager
from servd.launch.core_engines import CoreEngineProcManager, launch_core_engines
from servd.launch.engine_supervisor import LOOK_INTERVAL, EngineSupervisor, newest_engine
from servd.messages.engine import STALLED, EngineGone, EngineStatus

logger = logging.getLogger("servd.launch")

# What the main thread waits for: a child that has ended, a signal, or a function to call.
Event = Child | signal.Signals | Callable[[], None]

DEATH_GRACE = 1.0  # seconds for API servers to answer open requests when the engine is dead


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


@dataclass(eq=False)
class ProcessTree:
    """The parent of all processes. Without a `listener`, there are no API servers."""

    config: Config
    spec: ModelSpec
    decided: InitVar[dict[str, Decision]]
    ipc_dir: str
    listener: InitVar[socket.socket | None]
    read_config: Callable[[], Config]
    hands_over: InitVar[bool] = False

    def __post_init__(
        self, decided: dict[str, Decision], listener: socket.socket | None, hands_over: bool
    ) -> None:
        self.had_terminal = has_terminal()
        self.reload_is_due = False
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.adapters: set[str] = set()  # names of the adapters in --lora-modules
        num_engines = self.config.parallel.data_parallel_size
        # Folders of the engines' sockets, by rank.
        self.folders = [engine_dir(self.ipc_dir, rank) for rank in range(num_engines)]
        self.core_engines = CoreEngineProcManager([], None)
        self.api_servers = APIServerProcessManager(
            self.config,
            self.spec,
            {name: decision.why for name, decision in decided.items()},
            self.ipc_dir,
            self.folders,
            listener,
            self.find_generations,
            self.events.put,
            hands_over,
        )

    def start(self, started_at: float) -> None:
        """Start the children. Raise ConfigError if an adapter of --lora-modules is not valid."""
        if not self.config.server.attach:
            AdapterStore.beside(self.ipc_dir).clear()
            modules = self.load_adapters(self.config.lora.lora_modules)
            self.set_config(self.config.replace(lora_modules=modules))
            self.core_engines = launch_core_engines(
                self.config,
                self.spec,
                self.folders,
                self.events.put,
                self.report_stalled,
                self.fail,
            )
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Ray has set some
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                signal.signal(signum, self.on_signal)
        self.api_servers.start()
        self.core_engines.start(started_at)

    def set_config(self, config: Config) -> None:
        self.config = config
        self.api_servers.config = config
        self.core_engines.set_config(config)

    def fail(self, error: Exception) -> None:
        """Make this process end with `error`. Call this from another thread."""

        def give_up() -> None:
            raise error

        self.events.put(give_up)

    def find_generations(self) -> list[int]:
        """Return the engines' generations, by rank, for a new API server."""
        if self.config.server.attach:
            return [newest_engine(folder) for folder in self.folders]
        return [engine.number for engine in self.core_engines.supervisors]

    # ---- events ----

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Queue the signal. SimpleQueue.put is safe in a signal handler."""
        if signum == signal.SIGHUP:
            if self.reload_is_due:
                return
            self.reload_is_due = True
        self.events.put(signal.Signals(signum))

    def is_end(self, event: Event) -> bool:
        """Return whether an event is a signal to end. SIGHUP is one if the terminal is gone."""
        if event is signal.SIGHUP:
            return self.had_terminal and not has_terminal()
        return isinstance(event, signal.Signals)

    def next_event(self, deadline: float = math.inf) -> Child | signal.Signals | None:
        """Return the next child that ended, or the next signal. Check for hung children meanwhile.
        Return None after the deadline, on the monotonic clock.
        """
        while True:
            timeout = max(deadline - time.monotonic(), 0.0)
            try:
                event = self.events.get(timeout=min(LOOK_INTERVAL, timeout))
                if not callable(event):
                    return event
                event()
            except queue.Empty:
                if not timeout:
                    return None
                self.core_engines.watch()
                self.api_servers.watch()

    def watch(self) -> int:
        """Keep the children alive until a signal or a failed restart. Return the exit code."""
        while True:
            event = self.next_event()
            assert event is not None
            if event is signal.SIGHUP and not self.is_end(event):
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
            engine = self.core_engines.find_engine(event)
            if engine is not None:
                why = self.replace_engine(engine)
            else:
                were_ready = self.core_engines.were_ready
                why = self.api_servers.replace(event, were_ready, self.core_engines.detach)
            if why is not None:
                break
        code = 2 if event.exit_code == 2 else 1  # 2: a ConfigError, which the child has printed
        if code == 1:
            logger.error("%s: stopping", why)
        self.report_gone(why)
        self.wait_for_api_servers(DEATH_GRACE)
        return code

    def replace_engine(self, engine: EngineSupervisor) -> str | None:
        """Restart an engine. Return the reason if it is not restarted, else None."""
        died_at = time.monotonic()
        if (why := engine.handle_exit()) is not None:
            return why
        logger.error("%s: restarting it", engine.reason)
        self.api_servers.notify(engine.ipc_dir, engine.next_generation())
        engine.start(died_at)
        return None

    def report_stalled(self, engine: EngineSupervisor) -> None:
        """Report to API servers that an engine hangs, until it is restarted."""
        self.api_servers.notify(engine.ipc_dir, EngineStatus(STALLED, 0.0, engine.number))

    def report_gone(self, reason: str) -> None:
        for folder in self.folders:
            self.api_servers.notify(folder, EngineGone(reason))

    # ---- the end ----

    def drain(self) -> None:
        """Make the API servers finish open requests; wait for them, or until a second signal."""
        self.api_servers.finish_requests()
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
        while self.api_servers.are_running:
            event = self.next_event(deadline)
            if event is None or self.is_end(event):
                return
            engine = self.core_engines.find_engine(event)
            if engine is None or engine.child is None or replace is None:
                continue
            if not engine.child.exit_code:
                return
            if (why := replace(engine)) is not None:
                logger.error("%s: stopping", why)
                self.report_gone(why)
                replace = None

    def stop(self) -> None:
        """Stop all children. API servers stop first, because they need the engines."""
        self.api_servers.stop()
        if self.core_engines.supervisors:
            self.report_gone("the engine was stopped")  # to attached servers
        self.core_engines.stop()
        self.api_servers.remove_metrics()

    # ---- SIGHUP ----

    def reload(self) -> None:
        self.reload_is_due = False
        config = self.config
        try:
            new = self.read_config().with_absolute_paths()
            check_new_keys(new.access)
            tls_context(new.access)
            if (new.access.ssl_certfile is None) != (config.access.ssl_certfile is None):
                raise ConfigError("--ssl-certfile: only a restart can turn TLS on or off")
            if config.lora.enable_lora and not config.server.attach:
                config = config.replace(lora_modules=self.load_adapters(new.lora.lora_modules))
        except ConfigError as error:
            logger.error("SIGHUP: %s: nothing changed", error)
            return
        log.set_level(new.observability)
        access = msgspec.structs.asdict(new.access)
        self.set_config(config.replace(log_level=new.observability.log_level, **access))
        for child in [*self.api_servers.processes, *self.core_engines.processes]:
            child.post(self.config)
        logger.info("SIGHUP: read keys, limits, certificates, log level and adapters again")

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
