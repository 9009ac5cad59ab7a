"""RayEngineSupervisor: runs an engine on a host that Ray chooses, and restarts a lost engine.

Ray places an actor, and reports when the actor or its host is gone. The actor starts the engine's
process and monitors it, as `servd serve` does on its own host.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from servd.base.errors import ServdError
from servd.base.private_dir import private_dir
from servd.base.tracing import CLOCK_OFFSET
from servd.config import Config
from servd.core.client import EngineProcess, engine_address, identity
from servd.core.executor.ray import clock_offset, connect, find_spec, library, resource_of
from servd.ipc.child import Child
from servd.ipc.start_messages import HUB_IS_LOST, Uplink
from servd.launch.bridge import Bridge
from servd.launch.engine_supervisor import LOOK_INTERVAL, EngineSupervisor

log = logging.getLogger("servd.launch")

WARN_INTERVAL = 30.0  # seconds between warnings that Ray has no host yet
CONFIG_ERROR = 2  # exit code
LOOK_TIMEOUT = 1.0  # seconds in which the actor of a host that can be reached answers
LOST = -9  # exit code of an engine whose actor or host is gone


class Ended(msgspec.Struct):
    """A report of how an engine ended."""

    exit_code: int = LOST
    was_ready: bool = False
    reason: str = ""
    computing: list[str] = []  # see EngineRestarting


class StartElsewhere(msgspec.Struct):
    """A message with which an actor starts an engine."""

    config: Config  # as resolved here
    uplink: Uplink
    identity: str
    generation: int
    was_asleep: bool


class EngineActor:
    """A Ray actor that runs an engine."""

    def __init__(self) -> None:
        self.state = (False, False)

    def now_ns(self) -> int:
        """Return the monotonic clock of this host in nanoseconds."""
        return time.monotonic_ns()

    def host(self) -> str:
        """Return the address of this host."""
        return library().util.get_node_ip_address()

    def look(self) -> tuple[bool, bool]:
        """Return whether the engine is ready, and whether it is asleep."""
        return self.state

    def run(self, data: bytes, offset: int) -> bytes:
        """Run the engine of a StartElsewhere; return an Ended. `offset`: see `clock_offset`."""
        start = msgspec.msgpack.decode(data, type=StartElsewhere)
        os.environ[CLOCK_OFFSET] = str(offset)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's is 1; the engine divides this host's CPUs
        try:
            spec = find_spec(start.config)
        except ServdError as error:
            return msgspec.msgpack.encode(Ended(CONFIG_ERROR, reason=str(error)))
        engine = EngineSupervisor(
            start.config,
            spec,
            str(private_dir()),
            lambda _: None,
            uplink=start.uplink,
            identity=start.identity,
        )
        engine.set_generation(start.generation)
        engine.was_asleep = start.was_asleep
        engine.start(time.monotonic())
        assert engine.child is not None
        heartbeat = engine.child.heartbeat
        while engine.child.exit_code is None:
            time.sleep(LOOK_INTERVAL)
            engine.look()
            self.state = heartbeat.is_ready, heartbeat.is_asleep
        if engine.child.exit_code == HUB_IS_LOST:
            os._exit(HUB_IS_LOST)  # nobody may hear a report: this frees the host for other actors
        ended = Ended(
            engine.child.exit_code, heartbeat.is_ready, engine.reason, heartbeat.computing()
        )
        return msgspec.msgpack.encode(ended)


class RayEngine(EngineProcess):
    """An engine in an actor, seen as a process by its supervisor."""

    def __init__(self, name: str, config: Config, start: StartElsewhere) -> None:
        self.name = name
        self.ray = library()
        self.ended: Ended | None = None
        self.heartbeat = self  # the supervisor reads its fields here
        self.is_ready = False
        self.is_asleep = False
        self.is_silent = False  # the engine's connection is broken
        self.timeout = config.server.engine_heartbeat_timeout
        count = float(config.parallel.num_workers)
        kind = resource_of(config)
        options = {"num_cpus": count if kind == "CPU" else 0.0}
        options["num_gpus"] = count if kind == "GPU" else 0.0
        actor = self.ray.remote(**options, max_concurrency=2, scheduling_strategy="SPREAD")
        self.actor = actor(EngineActor).remote()
        self.message = msgspec.msgpack.encode(start)
        self.needs = f"{{{kind!r}: {count:g}}}"

    def on_exit(self, callback: Callable[[Child], None]) -> None:
        """Start the engine when it has a host. At its end, run `callback` in another thread."""

        def watch() -> None:
            try:
                self.ended = msgspec.msgpack.decode(self._run(), type=Ended)
            except Exception as error:  # the actor is gone, or its host
                lines = str(getattr(error, "cause", None) or error).split("\n")
                reason = f"{self.name} is lost: {lines[0]}"
                self.ended = Ended(was_ready=self.is_ready, reason=reason)
            callback(self)
            self.ray.kill(self.actor)  # otherwise, the actor keeps its resources

        threading.Thread(target=watch, name=f"watch-{self.name}", daemon=True).start()

    def _run(self) -> bytes:
        ray = self.ray
        here = self.actor.host.remote()
        while not ray.wait([here], timeout=WARN_INTERVAL)[0]:
            free = ray.available_resources()
            log.warning(
                "%s waits for Ray: it needs %s, and %s are free", self.name, self.needs, free
            )
        self.name = f"{self.name} on {ray.get(here)}"
        run = self.actor.run.remote(self.message, clock_offset(ray, self.actor))
        look = self.actor.look.remote()
        looked_at = time.monotonic()
        while not ray.wait([run], timeout=LOOK_INTERVAL)[0]:
            if ray.wait([look], timeout=0)[0]:
                self.is_ready, self.is_asleep = ray.get(look)
                look = self.actor.look.remote()
                looked_at = time.monotonic()
            elif self.is_silent and time.monotonic() > looked_at + LOOK_TIMEOUT:
                # Ray itself takes a minute to notice that a host is silent.
                raise ConnectionError(
                    f"no heartbeat for {self.timeout:g} s (--engine-heartbeat-timeout)"
                )
        return ray.get(run)

    def computing(self) -> list[str]:
        return self.ended.computing if self.ended else []

    @property
    def exit_code(self) -> int | None:
        return self.ended.exit_code if self.ended else None

    def post(self, message: msgspec.Struct) -> None:
        """Do nothing: new options apply only to processes of this host."""

    def terminate(self) -> None:
        """Kill the actor. `on_exit` then calls back."""
        if self.ended is None:
            self.ray.kill(self.actor)

    def stop(self, timeout: float) -> None:
        self.terminate()


@dataclass(eq=False)
class RayEngineSupervisor(EngineSupervisor):
    """A supervisor that makes Ray place an engine, and place it again when it is lost. The bridge
    forwards the engine's messages.
    """

    bridge: Bridge = field(kw_only=True)

    def start(self, started_at: float) -> None:
        if self.child is not None:
            self.was_asleep = self.child.heartbeat.is_asleep
        address = engine_address(self.ipc_dir, self.number)
        num_nodes = sum(node["Alive"] for node in library().nodes())
        config = self.config.replace(
            api_key=[],
            data_parallel_backend="mp",
            data_parallel_start_rank=self.rank,
            data_parallel_size_local=-(-self.config.parallel.data_parallel_size // num_nodes),
            max_engine_restarts=0,
        )
        uplink = self.bridge.open(address, partial(self.lose, self.number))
        start = StartElsewhere(
            config, uplink, identity(self.config, self.spec), self.number, self.was_asleep
        )
        self.reason = ""
        self.child = RayEngine(self.name, self.config, start)
        self.child.on_exit(self.on_exit)

    def lose(self, number: int) -> None:
        """Expect the end of the engine of this number, because its connection is broken."""
        if number == self.number and isinstance(self.child, RayEngine):
            self.child.is_silent = True

    def look(self) -> None:
        """Do nothing: the actor monitors its engine."""

    def replace(self) -> str | None:
        assert isinstance(self.child, RayEngine) and self.child.ended is not None
        self.bridge.forget(engine_address(self.ipc_dir, self.number))
        # A lost host is no fault of the model: only the number of deaths is bounded.
        self.child.is_ready = self.child.ended.was_ready or self.child.exit_code == LOST
        self.reason = self.child.ended.reason
        return super().replace()


def start_bridge(config: Config, on_failure: Callable[[Exception], None]) -> Bridge:
    """Return the bridge of this process to Ray. Raise ConfigError without a cluster."""
    ray = connect("--data-parallel-backend ray")
    timeout = config.server.engine_heartbeat_timeout
    bridge = Bridge(ray.util.get_node_ip_address(), timeout, on_failure)
    bridge.start()
    return bridge
