"""CoreEngineProcManager: starts, watches and restarts the engines of `servd serve`."""

import os
from collections.abc import Callable, Sequence

from servd.checkpoint import model_spec
from servd.config import Config
from servd.core.client import ENGINE_STOP_TIMEOUT
from servd.ipc.child import Child
from servd.launch.bridge import Bridge
from servd.launch.engine_supervisor import EngineSupervisor, Notify


class CoreEngineProcManager:
    """The engines of all ranks, each with its supervisor; none with --attach."""

    def __init__(self, supervisors: Sequence[EngineSupervisor], bridge: Bridge | None) -> None:
        self.supervisors = supervisors  # by rank
        self.bridge = bridge  # if there are engines on other hosts

    def start(self, started_at: float) -> None:
        for engine in self.supervisors:
            engine.start(started_at)

    @property
    def were_ready(self) -> bool:
        return all(engine.was_ready for engine in self.supervisors)

    def find_engine(self, event: object) -> EngineSupervisor | None:
        """Return the engine whose process is `event`."""
        return next((engine for engine in self.supervisors if engine.child is event), None)

    def watch(self) -> None:
        """Kill hung engines, and start standby processes. Call this every LOOK_INTERVAL."""
        for engine in self.supervisors:
            engine.look()

    def set_config(self, config: Config) -> None:
        for engine in self.supervisors:
            engine.config = config
            if engine.child is not None:
                engine.child.post(config)

    def detach(self, client: int, inbox: str) -> None:
        """Make engines on other hosts drop the requests of an API server that has ended."""
        if self.bridge is not None:
            self.bridge.detach(client, inbox)

    def stop(self) -> None:
        for engine in self.supervisors:
            engine.terminate()
        for engine in self.supervisors:
            engine.stop(ENGINE_STOP_TIMEOUT)
        if self.bridge is not None:
            self.bridge.close()


def launch_core_engines(
    config: Config,
    spec: model_spec.ModelSpec,
    folders: Sequence[str],
    on_exit: Callable[[Child], None],
    notify: Notify,
    on_failure: Callable[[Exception], None],
) -> CoreEngineProcManager:
    """Return the manager of this host's engines, and of the engines that Ray places, one for each
    folder of sockets. Raise ConfigError if Ray has no cluster.
    """
    supervisors: list[EngineSupervisor] = []
    bridge: Bridge | None = None
    for place, folder in enumerate(folders):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if place < config.parallel.num_engines_here:
            engine = EngineSupervisor(config, spec, folder, on_exit, place, notify)
        else:
            from servd.launch.ray_engine import RayEngineSupervisor, start_bridge

            if bridge is None:
                bridge = start_bridge(config, on_failure)
            engine = RayEngineSupervisor(
                config, spec, folder, on_exit, place, notify, bridge=bridge
            )
        supervisors.append(engine)
    return CoreEngineProcManager(supervisors, bridge)
