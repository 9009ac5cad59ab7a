"""EngineSupervisor: starts the engine of a rank, and restarts an engine that dies or hangs."""

import logging
import math
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config, ParallelConfig, ServerConfig
from servd.core.client import EngineProcess, engine_address
from servd.ipc.child import STANDBY_NICE, Child
from servd.ipc.heartbeat import Watchdog
from servd.ipc.start_messages import StartEngine, Uplink
from servd.messages.engine import STALLED, EngineGone, EngineRestarting, EngineStatus

logger = logging.getLogger("servd.launch")

EngineMessage = EngineGone | EngineRestarting | EngineStatus
Notify = Callable[[str, EngineMessage], None]  # with the folder of the engine

LOOK_INTERVAL = 0.2  # seconds between readings of the engine's heartbeat
STANDBY_DELAY = 10.0  # seconds after the engine is ready, when a standby process is started


def devices_of(place: int, config: ParallelConfig) -> str:
    """Return CUDA_VISIBLE_DEVICES for the engine at `place` on this host; "" for all devices."""
    if config.device != "cuda" or config.num_engines_here == 1:
        return ""
    size = config.num_workers
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        variable.split(",") if variable else [str(i) for i in range(size * config.num_engines_here)]
    )
    return ",".join(devices[place * size : (place + 1) * size])


def newest_engine(folder: str) -> int:
    """Return the generation of the newest engine that listens in a folder; -1 without one."""
    live = [path.name for path in Path(folder).glob("engine*") if somebody_listens(str(path))]
    return max((int(name.partition("-")[2] or 0) for name in live), default=-1)


def somebody_listens(path: str) -> bool:
    """Return whether a process listens on a Unix socket. A leftover file does not count."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


class Deaths:
    """A counter of children's deaths within --engine-restart-window."""

    def __init__(self, config: ServerConfig) -> None:
        self.max_deaths = config.max_engine_restarts
        self.window = config.engine_restart_window
        self.times: deque[float] = deque()

    def add(self) -> bool:
        """Count a death. Return whether there were too many deaths."""
        now = time.monotonic()
        self.times.append(now)
        while self.times[0] < now - self.window:
            self.times.popleft()
        return len(self.times) > self.max_deaths


@dataclass(eq=False)
class EngineSupervisor:
    """A supervisor that starts a rank's engine, and restarts it while the API servers stay."""

    config: Config  # resolved
    spec: ModelSpec
    ipc_dir: str  # folder of the engine's sockets
    on_exit: Callable[[Child], None]  # called from another thread when the engine has ended
    place: int = 0  # among the engines of this host
    notify: Notify = lambda folder, message: None  # API servers
    uplink: Uplink | None = None  # of an engine on another host than the API servers
    identity: str = ""  # see MPClient; of the same

    def __post_init__(self) -> None:
        config = self.config
        rank = config.parallel.first_rank + self.place
        self.rank = rank
        is_one = config.parallel.data_parallel_size == 1 and not rank
        self.name = "engine" if is_one else f"engine-{rank}"  # in the log
        self.label = "the engine" if is_one else f"engine {rank}"
        self.first = 0
        self.number = 0  # of restarts
        self.was_asleep = False  # whether the last engine was asleep
        self.child: EngineProcess | None = None
        # A process for the next start that has imported torch, which is half of the time.
        self.standby: EngineProcess | None = None
        self.standby_at = -math.inf  # when the last standby process was started
        parallel = config.parallel
        self.prepares = parallel.executor or "uniproc", str(parallel.num_workers)
        self.deaths = Deaths(config.server)

    def config_of_rank(self) -> Config:
        config = self.config
        if self.rank and (events := config.cache.kv_events_config):
            config = config.replace(kv_events_config=events.of_rank(self.rank))
        if self.rank and (transfer := config.cache.kv_transfer_config):
            config = config.replace(kv_transfer_config=transfer.of_rank(self.rank))
        return config

    def start(self, started_at: float) -> None:
        self._drop_bad_standby()
        self.standby = self.standby or self._new_process(0)
        if self.child is not None:
            self.was_asleep = self.child.heartbeat.is_asleep
        self.child, self.standby = self.standby, None
        start = StartEngine(
            self.config_of_rank(),
            self.spec,
            self.ipc_dir,
            started_at,
            self.number,
            self.child.descriptor,
            self.name,
            self.was_asleep,
            self.uplink,
            self.identity,
        )
        self.child.send(start)
        timeout = self.config.server.engine_hang_timeout
        has_workers = self.config.parallel.num_workers > 1
        is_stopped = partial(self.child.is_stopped, has_workers)
        self.watch = Watchdog(
            self.child.heartbeat, LOOK_INTERVAL, timeout, is_stopped, self.child.cpu_waits
        )
        self.reason = ""
        self.child.on_exit(self.on_exit)

    def look(self) -> None:
        """Kill a hung engine, or start a standby process. Call this every LOOK_INTERVAL."""
        if not self.child or self.reason or self.child.exit_code is not None:
            return
        if reason := self.watch.look():
            logger.error("%s: hung: %s: stacks of its threads follow", self.name, reason)
            self.reason = f"{self.label} was hung: {reason}"
            self.notify(self.ipc_dir, EngineStatus(STALLED, 0.0, self.number))
            self.child.kill_hung()
            return
        self._drop_bad_standby()
        has_delay = self.watch.seconds_ready <= STANDBY_DELAY
        if self.standby is None and self.deaths.max_deaths and not has_delay:
            waited = time.monotonic() - self.standby_at
            if waited >= STANDBY_DELAY:  # a failing process must not be started all the time
                self.standby_at = time.monotonic()
                self.standby = self._new_process(STANDBY_NICE)

    def _drop_bad_standby(self) -> None:
        """Remove a standby process that has ended and cannot become the engine."""
        if self.standby is None:
            return
        if self.standby.exit_code is None:
            if not self.standby.is_stopped():
                return
            self.standby.process.kill()
        logger.warning("%s: replacing the standby process, which ended", self.name)
        self.standby.stop(0)  # reaps it
        self.standby = None

    def _new_process(self, niceness: int) -> EngineProcess:
        devices = devices_of(self.place, self.config.parallel)
        prepares = *self.prepares, str(niceness)
        return EngineProcess(self.ipc_dir, prepares, self.name, devices)

    def terminate(self) -> None:
        for child in (self.standby, self.child):
            if child is not None:
                child.terminate()

    def stop(self, timeout: float) -> None:
        for child in (self.standby, self.child):
            if child is not None:
                child.stop(timeout)

    def set_generation(self, number: int) -> None:
        if self.child is None:
            self.first = number
        self.number = number

    @property
    def was_ready(self) -> bool:
        return bool(self.number > self.first or (self.child and self.child.heartbeat.is_ready))

    def replace(self) -> str | None:
        """Restart the engine after its end. Return the reason if it is not restarted, else None."""
        died_at = time.monotonic()
        assert self.child is not None
        self.child.stop(0)  # closes its pipe
        self.reason = self.reason or f"{self.label} ended with code {self.child.exit_code}"
        address = engine_address(self.ipc_dir, self.number)
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        for folder in Path(self.ipc_dir).glob("servd-*"):  # folders of its workers
            shutil.rmtree(folder, ignore_errors=True)
        if not self.was_ready:
            return f"{self.reason} before it was ready"
        if self.deaths.add():
            return (
                f"{self.reason}; it died more than {self.deaths.max_deaths} times within "
                f"{self.deaths.window:g} s (--max-engine-restarts)"
            )
        logger.error("%s: restarting it", self.reason)
        self.number += 1
        computing = self.child.heartbeat.computing()
        self.notify(self.ipc_dir, EngineRestarting(self.number, self.reason, computing))
        self.start(died_at)
        return None
