"""RayExecutor: workers in the bundles of a placement group of a Ray cluster, one in each.

Ray only starts the actors: servd's own links notice within a second when one is gone.
"""

from __future__ import annotations

import importlib
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

import servd
from servd.config import Config
from servd.core.executor._remote import RemoteExecutor, WorkerMember, find_model
from servd.errors import ConfigError
from servd.ipc import Keys, tcp_address
from servd.join import Join
from servd.messages import WorkerReady

PLACEMENT_TIMEOUT = 60.0  # seconds in which bundles become free, or nodes are added


def library(name: str = "ray") -> Any:
    """A module of Ray. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError("--executor ray needs Ray: pip install 'servd[ray]'") from None


class Bundle:
    """The actor of a bundle: a worker process on whatever host Ray has put it."""

    def meeting_point(self) -> str:
        """A free port of this host, for torch.distributed."""
        with socket.create_server(("", 0)) as probe:
            return tcp_address(library().util.get_node_ip_address(), probe.getsockname()[1])

    def run(self, at: str, token: str, config: bytes, rank: int, num_here: int) -> None:
        """Be joined to the executor until it is gone. `at`: where it listens; `num_here`: workers
        of this host, which share its CPUs.
        """
        spec = find_model(msgspec.msgpack.decode(config, type=Config))
        join, errors = Join(servd.__version__, socket.gethostname(), 0, rank, {}), list[Exception]()
        WorkerMember(at, join, Keys(token), spec, num_here, errors.append).run()
        raise errors[0]


class RayExecutor(RemoteExecutor):
    """Wants a bundle `{"GPU": 1}`, or `{"CPU": 1}` on CPUs, for each worker, on few hosts."""

    group: Any = None
    actors: Sequence[Any] = ()

    @property
    def num_here(self) -> int:
        """None: this process has none of Ray's resources."""
        return 0

    @property
    def meeting_point(self) -> str:
        return self.ray.get(self.actors[0].meeting_point.remote())

    def start(self) -> WorkerReady:
        """Place the workers. Raises ConfigError: no cluster, or not as much of it is free."""
        ray = self.ray = library()
        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=False, logging_level="warning")
            except (ConnectionError, ray.exceptions.RayError) as error:
                raise ConfigError(
                    f"--executor ray: {error}; start one with `ray start --head`, and name it in "
                    "$RAY_ADDRESS if it is elsewhere"
                ) from None
        hosts, token = self._place(), secrets.token_hex(32)
        at = self.listen(tcp_address(ray.util.get_node_ip_address(), 0), dict, Keys(token))
        config = msgspec.msgpack.encode(self.config)
        runs = [
            actor.run.remote(at, token, config, rank, hosts.count(hosts[rank]))
            for rank, actor in enumerate(self.actors)
        ]
        threading.Thread(target=self._watch, args=[runs], name="ray", daemon=True).start()
        return super().start()

    def _place(self) -> list[str]:
        ray, groups = self.ray, library("ray.util.placement_group")
        count = self.config.parallel.num_workers
        kind = "GPU" if self.config.parallel.device == "cuda" else "CPU"
        self.progress("waiting for Ray", 0.0)
        self.group = groups.placement_group([{kind: 1.0}] * count, strategy="PACK")
        if not self.group.wait(PLACEMENT_TIMEOUT):
            free = {name: n for name, n in ray.available_resources().items() if name == kind}
            raise ConfigError(
                f"--executor ray: {count} workers need as many times {{{kind!r}: 1}}, and the "
                f"cluster has {free or f'no {kind}'} free: add nodes, or lower "
                "--tensor-parallel-size or --pipeline-parallel-size"
            )
        strategies = library("ray.util.scheduling_strategies")
        options = {"num_cpus": float(kind == "CPU"), "num_gpus": float(kind == "GPU")}
        bundles = [
            strategies.PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i)
            for i in range(count)
        ]
        actor = ray.remote(**options, max_concurrency=2)(Bundle)
        self.actors = [actor.options(scheduling_strategy=each).remote() for each in bundles]
        table = groups.placement_group_table(self.group)["bundles_to_node_id"]
        return [table[rank] for rank in range(count)]

    def _watch(self, runs: list[Any]) -> None:
        """Thread: an actor that ends before its worker has joined would be waited for."""
        try:
            self.ray.get(self.ray.wait(runs)[0])
        except Exception as error:
            self.lose(f"an actor of Ray has ended: {error}")

    def shutdown(self) -> None:
        super().shutdown()
        for actor in self.actors:
            self.ray.kill(actor)
        if self.group is not None:
            library("ray.util.placement_group").remove_placement_group(self.group)
        self.actors, self.group = (), None


Executor = RayExecutor  # the name that every file of this package has
