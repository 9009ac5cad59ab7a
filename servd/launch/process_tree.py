"""ProcessTree: keeps the engines and API servers of `servd serve` alive until a signal."""

import logging
import signal
import socket
import time
from collections.abc import Callable

from servd.base import log
from servd.base.errors import ConfigError
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.data_parallel import Decision
from servd.core.client import engine_dir
from servd.launch.api_servers import APIServerProcessManager
from servd.launch.core_engines import CoreEngineProcManager, launch_core_engines
from servd.launch.engine_supervisor import EngineMessage
from servd.launch.events import Events
from servd.launch.reload import load_adapters, reload_config

logger = logging.getLogger("servd.launch")

DEATH_GRACE = 1.0  # seconds for API servers to answer open requests when the engine is dead


class ProcessTree:
    """The parent of all processes. Without a `listener`, there are no API servers. Raises
    ConfigError if an adapter of --lora-modules is not valid, or Ray has no cluster.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        decided: dict[str, Decision],
        ipc_dir: str,
        listener: socket.socket | None,
        read_config: Callable[[], Config],
        hands_over: bool = False,
    ) -> None:
        self.ipc_dir = ipc_dir
        self.read_config = read_config
        self.events = Events()
        folders = [engine_dir(ipc_dir, i) for i in range(config.parallel.data_parallel_size)]
        self.core_engines = CoreEngineProcManager([], None)
        if not config.server.attach:
            AdapterStore.beside(ipc_dir).clear()
            config = load_adapters(config, config.lora.lora_modules, ipc_dir)
            self.core_engines = launch_core_engines(
                config, spec, folders, self.events.queue.put, self.notify, self.events.queue.put
            )
        self.config = config
        self.api_servers = APIServerProcessManager(
            config,
            spec,
            {name: decision.why for name, decision in decided.items()},
            ipc_dir,
            folders,
            listener,
            self.core_engines,
            self.events.queue.put,
            hands_over,
        )

    def start(self, started_at: float) -> None:
        self.events.catch_signals()
        self.api_servers.start()
        self.core_engines.start(started_at)

    def notify(self, folder: str, message: EngineMessage) -> None:
        """Send a message about the engine of a folder to all API servers."""
        self.api_servers.notify(folder, message)

    def watch(self) -> None:
        """Kill hung children, and start standby engines. Call this every LOOK_INTERVAL."""
        self.core_engines.watch()
        self.api_servers.watch()

    def run(self) -> int:
        """Keep the children alive until a signal or a failed restart. Return the exit code."""
        while True:
            event = self.events.wait(self.watch)
            assert event is not None
            if event is signal.SIGHUP and not self.events.is_end(event):
                self.reload()
            elif isinstance(event, signal.Signals):
                self.drain(event.name)
                return 0
            else:
                engine = self.core_engines.find_engine(event)
                reason = engine.replace() if engine else self.api_servers.replace(event)
                if reason is not None:
                    break
        code = 2 if event.exit_code == 2 else 1  # 2: a ConfigError, which the child has printed
        if code == 1:
            logger.error("%s: stopping", reason)
        self.api_servers.notify_gone(reason)
        self.wait_for_api_servers(DEATH_GRACE, keep_engines=False)
        return code

    def drain(self, signal_name: str) -> None:
        """Make the API servers finish open requests; wait for them, or until a second signal."""
        timeout = self.config.server.shutdown_timeout
        logger.info(
            "%s: finishing open requests, at most %g s; a second one stops at once",
            signal_name,
            timeout,
        )
        self.api_servers.finish_requests()
        # The API servers apply the timeout themselves; add one second for their exit.
        self.wait_for_api_servers(timeout + 1, keep_engines=True)

    def wait_for_api_servers(self, timeout: float, keep_engines: bool) -> None:
        """Wait until all API servers have ended, for `timeout` seconds, or until a signal to end.
        With `keep_engines`, restart an engine that dies meanwhile, because open requests need it.
        If it exits with 0, return at once: it was stopped together with this process, e.g. by
        systemd.
        """
        deadline = time.monotonic() + timeout
        while self.api_servers.are_running:
            event = self.events.wait(self.watch, deadline)
            if event is None or self.events.is_end(event):
                return
            engine = self.core_engines.find_engine(event)
            if engine is None or engine.child is None or not keep_engines:
                continue
            if not engine.child.exit_code:
                return
            reason = engine.replace()
            if reason is not None:
                logger.error("%s: stopping", reason)
                self.api_servers.notify_gone(reason)
                keep_engines = False

    def stop(self) -> None:
        """Stop all children. API servers stop first, because they need the engines."""
        self.api_servers.stop()
        if self.core_engines.supervisors:
            self.api_servers.notify_gone("the engine was stopped")  # to attached servers
        self.core_engines.stop()
        self.api_servers.remove_metrics()

    def reload(self) -> None:
        """Read the options again, and pass on what may change."""
        self.events.reload_is_due = False
        try:
            new = self.read_config().with_absolute_paths()
            self.config = reload_config(self.config, new, self.ipc_dir)
        except ConfigError as error:
            logger.error("SIGHUP: %s: nothing changed", error)
            return
        log.set_level(self.config.observability)
        self.api_servers.set_config(self.config)
        self.core_engines.set_config(self.config)
        logger.info("SIGHUP: read keys, limits, certificates, log level and adapters again")
