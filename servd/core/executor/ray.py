"""RayExecutor: workers in a placement group of a Ray cluster, one in each bundle.

Ray chooses the hosts, starts an actor in each bundle, gives it the keys of servd's channel, and
reports actors that exit. Messages use servd's own channel.
"""

import fcntl
import importlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from servd.base.errors import ConfigError
from servd.base.tracing import CLOCK_OFFSET
from servd.checkpoint import hub, model_spec
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
from servd.config import Config
from servd.core.executor.multiproc import STOP_TIMEOUT, MultiProcExecutor
from servd.ipc.channels import tcp_address
from servd.ipc.child import Child
from servd.ipc.hub import Hub, HubReceiver, HubSender
from servd.ipc.start_messages import StartWorker
from servd.messages.engine import FromWorker, WorkerReady

# Name the interface over which gloo and NCCL connect workers.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
PLACEMENT_TIMEOUT = 60.0  # seconds in which bundles become free, or nodes are added


def library(name: str = "ray") -> Any:
    """Return a module of Ray. Raises ConfigError if Ray is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError("--executor ray needs Ray: pip install 'ray[serve]'") from None


def connect(option: str) -> Any:
    """Return Ray, connected to its cluster. Raises a ConfigError that names `option`."""
    ray = library()
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="warning")
        except (ConnectionError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"{option}: {error}; start one with `ray start --head`, and name it in "
                "$RAY_ADDRESS if it is elsewhere"
            ) from None
    return ray


def resource_of(config: Config) -> str:
    """Return the resource that Ray counts for each worker."""
    return "GPU" if config.parallel.device == "cuda" else "CPU"


def find_spec(config: Config) -> ModelSpec:
    """Return the model's spec on this host. Raises ModelNotFound if it cannot be downloaded."""
    model = config.model
    if model.model is None:
        return FAKE_SPEC
    return model_spec.read_spec(
        hub.find_model(model.model, model.revision, model.download_dir), model.hf_overrides
    )


def clock_offset(ray: Any, actor: Any) -> int:
    """Return the nanoseconds from an actor's clock to this host's; 0 if both may be equal."""
    before = time.monotonic_ns()
    theirs = ray.get(actor.now_ns.remote())
    after = time.monotonic_ns()
    offset = (before + after) // 2 - theirs
    return offset if abs(offset) > after - before else 0


def interface_of(address: str) -> str | None:
    """Return the name of this host's network interface with an IPv4 address; None: there is none,
    or it is an IPv6 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


class WorkerActor:
    """The actor of a bundle: runs a worker process on the host that Ray chose."""

    def meeting_point(self) -> str:
        """Return an address of this host with a free port, for torch.distributed."""
        with socket.create_server(("", 0)) as probe:
            return tcp_address(library().util.get_node_ip_address(), probe.getsockname()[1])

    def now_ns(self) -> int:
        """Return the time of this host's clock."""
        return time.monotonic_ns()

    def run(self, data: bytes, num_here: int, offset: int) -> int:
        """Run the worker of a StartWorker (`data`) until it exits; return its exit code. `num_here`
        workers share this host's CPUs. `offset` comes from `clock_offset`.
        """
        start = msgspec.msgpack.decode(data, type=StartWorker)
        start = msgspec.structs.replace(start, spec=find_spec(start.config))
        model = start.config.model
        if model.model is not None and model.load_format != "dummy":
            hub.download_weights(model.model, model.revision, model.download_dir, model.load_format)
        num_threads = max((os.cpu_count() or 1) // num_here, 1)
        env = {"OMP_NUM_THREADS": str(num_threads), CLOCK_OFFSET: str(offset)}  # Ray's is 1
        # Without a name, gloo takes the interface that this host's name resolves to: on Debian, lo.
        if interface := interface_of(library().util.get_node_ip_address()):
            env |= {name: os.environ.get(name, interface) for name in INTERFACE_VARIABLES}
        module = MultiProcExecutor.worker_module
        return Child(f"worker-{start.rank}", module, start, env=env).process.wait()


class RayExecutor(MultiProcExecutor):
    """Runs each worker in a bundle, `{"GPU": 1}` or `{"CPU": 1}`, packed on few hosts."""

    group: Any = None
    actors: Sequence[Any] = ()
    runs: Sequence[Any] = ()  # of the actors

    @classmethod
    def prepare(cls, standby: list[Child], num_workers: int, niceness: int = 0) -> None:
        """Do nothing: the actors start the processes."""

    @property
    def meeting_point(self) -> str:
        return self.ray.get(self.actors[0].meeting_point.remote())

    def start(self) -> WorkerReady:
        """Place and start workers. Raises ConfigError if no cluster has the free resources."""
        self.ray = connect("--executor ray")
        self.hosts = self._place()
        self.inbox.close()
        self.hub = Hub(
            self.ray.util.get_node_ip_address(),
            self.config.server.engine_heartbeat_timeout,
            lambda name: self.lose(f"the connection to {name} broke or was silent"),
        )
        self.inbox = HubReceiver(self.hub, FromWorker)
        return super().start()

    def start_workers(self) -> None:
        meeting_point = self.meeting_point
        runs: list[Any] = []
        for rank, actor in enumerate(self.actors):
            addresses = self.inbox.at, meeting_point, self.hub.uplink(f"worker-{rank}")
            config = self.config.replace(api_key=[])
            start = StartWorker(config, self.spec, rank, "", *addresses)
            num_here = self.hosts.count(self.hosts[rank])
            offset = clock_offset(self.ray, actor)
            runs.append(actor.run.remote(msgspec.msgpack.encode(start), num_here, offset))
        self.runs = runs
        threading.Thread(target=self._watch, args=[runs], name="ray", daemon=True).start()

    def open_outbox(self, rank: int) -> HubSender:
        return HubSender(self.hub, f"worker-{rank}")

    def _place(self) -> list[str]:
        ray = self.ray
        groups = library("ray.util.placement_group")
        count = self.config.parallel.num_workers
        kind = resource_of(self.config)
        self.progress("waiting for Ray", 0.0)
        self.group = groups.placement_group([{kind: 1.0}] * count, strategy="PACK")
        if not self.group.wait(PLACEMENT_TIMEOUT):
            free = {name: n for name, n in ray.available_resources().items() if name == kind}
            raise ConfigError(
                f"--executor ray: {count} workers need {{{kind!r}: 1}} each, but the cluster has "
                f"{free or f'no {kind}'} free: add nodes, or lower --tensor-parallel-size or "
                "--pipeline-parallel-size"
            )
        strategies = library("ray.util.scheduling_strategies")
        options = {"num_cpus": float(kind == "CPU"), "num_gpus": float(kind == "GPU")}
        bundles = [
            strategies.PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i)
            for i in range(count)
        ]
        actor = ray.remote(**options)(WorkerActor)
        self.actors = [actor.options(scheduling_strategy=bundle).remote() for bundle in bundles]
        table = groups.placement_group_table(self.group)["bundles_to_node_id"]
        return [table[rank] for rank in range(count)]

    def _watch(self, runs: list[Any]) -> None:
        """Report the first worker that ends, in a thread."""
        try:
            [first], _ = self.ray.wait(runs)
            why = f"worker-{runs.index(first)} ended with exit code {self.ray.get(first)}"
        except Exception as error:
            why = f"a worker of Ray is gone: {error}"
        self.lose(why)

    def wait_for_workers(self) -> None:
        # Before the hub is closed, which to workers is the loss of their server.
        if self.runs:
            self.ray.wait([*self.runs], num_returns=len(self.runs), timeout=STOP_TIMEOUT)

    def shutdown(self) -> None:
        super().shutdown()
        for actor in self.actors:
            self.ray.kill(actor)
        if self.group is not None:
            library("ray.util.placement_group").remove_placement_group(self.group)
        self.actors = ()
        self.group = None
