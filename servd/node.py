"""Node: the process tree of a host that has engines for the API servers of another one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial

import servd
from servd import hf
from servd.child import Child
from servd.config import Config
from servd.core.client import engine_dir, identity
from servd.incarnations import Incarnations
from servd.ipc import Keys
from servd.join import Join, read_token, terms_of
from servd.messages import EngineDead, EngineRestarting
from servd.process_tree import ENGINE_STOP_TIMEOUT, ProcessTree, logger
from servd.relay import NodeRelay
from servd.resolve import Decision


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
        by_rank = {first + place: folder for place, folder in enumerate(self.folders)}
        terms = terms_of(config, spec)
        join = Join(servd.__version__, socket.gethostname(), 0, [*by_rank], terms)
        self.relay = NodeRelay(
            config, join, by_rank, identity(config, spec), Keys(read_token(config)),
            lambda numbers: self.events.put(partial(self.begin, numbers)),
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
        logger.info("joining %s with engines %s", self.relay.head, [*self.relay.folders])
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
            rank = next(rank for rank, own in self.relay.folders.items() if own == folder)
            self.relay.restarted(rank, message)
        else:
            self.relay.reason = message.reason

    def stop(self) -> None:
        """End all, after the API servers were told: requests go on elsewhere at once."""
        self.relay.close()
        super().stop()
