"""Node: the process tree of a host that has engines for the API servers of another one, or workers
for its engine.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

import servd
from servd import hf
from servd.child import Child
from servd.config import Config
from servd.core.client import engine_dir, identity
from servd.core.executor._remote import WorkerHost, find_model
from servd.incarnations import Incarnations
from servd.ipc import Keys, tcp_address
from servd.join import Join, read_token, terms_of
from servd.messages import EngineDead, EngineRestarting
from servd.node_relay import NodeRelay
from servd.process_tree import ENGINE_STOP_TIMEOUT, ProcessTree, head_address, logger, places
from servd.resolve import Decision


def serve_workers(config: Config, spec: hf.ModelSpec) -> int:
    """Run this host's workers of an engine on another one, until a signal; returns the exit code.

    Raises:
        ConfigError: the engine does not take this host.
    """
    parallel = config.parallel
    size = parallel.num_workers // parallel.nnodes
    ranks = [*range(parallel.node_rank * size, (parallel.node_rank + 1) * size)]
    at = tcp_address(parallel.master_addr or "", parallel.master_port)
    join = Join(servd.__version__, socket.gethostname(), 0, ranks, terms_of(config, spec))
    host = WorkerHost(at, join, Keys(read_token(config)), lambda _: find_model(config))
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: host.stop())
    logger.info("joining %s with workers %s", at, ranks)
    host.run()
    return 0


class Node(ProcessTree):
    """Runs engines for as long as it is joined to the host of the API servers. When that is lost
    they end, as nobody knows any more what they do, and it joins again.
    """

    def __init__(
        self,
        config: Config,
        spec: hf.ModelSpec,
        decided: dict[str, Decision],
        ipc_dir: str,
        started_at: float,
        read_config: Callable[[], Config],
    ) -> None:
        super().__init__(config, spec, decided, ipc_dir, None, started_at, read_config)
        first = config.parallel.first_rank
        self.folders = [engine_dir(ipc_dir, i) for i in range(config.parallel.num_engines_here)]
        self.ranks = [*range(first, first + len(self.folders))]
        join = Join(servd.__version__, socket.gethostname(), 0, self.ranks, terms_of(config, spec))
        self.relay = NodeRelay(
            head_address(config), join, places(self.folders, first), identity(config, spec),
            Keys(read_token(config)),
            lambda numbers, _: self.events.put(partial(self.begin, numbers)),
            lambda why: self.events.put(partial(self.end, why)),
            self.fail,
        )  # fmt: skip

    def start(self) -> None:
        """Join."""
        self.heed_signals()
        for place, folder in enumerate(self.folders):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            one = Incarnations(self.config, self.spec, folder, self.events.put, place)
            self.engines.append(one)
        logger.info("joining %s with engines %s", self.relay.head, self.ranks)
        self.relay.start()

    def begin(self, numbers: list[int]) -> None:
        """Start the engines: this host has joined."""
        for engine, number in zip(self.engines, numbers, strict=True):
            engine.count_from(number)
            engine.start(time.monotonic())

    def end(self, why: str) -> None:
        """End the engines, and join again."""
        logger.error("%s: its engines end, to start when it is there again", why)
        for engine in self.engines:
            engine.terminate()
        for engine in self.engines:
            engine.forget(ENGINE_STOP_TIMEOUT)
        self.relay.rejoin()

    def replace_api_server(self, child: Child) -> str | None:
        """It is none, but an engine that was told to end."""
        return None

    def tell(self, folder: str, message: EngineDead | EngineRestarting) -> None:
        """Have the API servers know."""
        if isinstance(message, EngineRestarting):
            self.relay.restarted(self.ranks[self.folders.index(folder)], message)
        else:
            self.relay.reason = message.reason

    def stop(self) -> None:
        """End all, after the API servers were told: requests go on elsewhere at once."""
        self.relay.close()
        super().stop()
