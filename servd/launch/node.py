"""Node: runs engines for the API servers of another host (the head), or workers for its engine."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any

from servd import hf
from servd.config import Config
from servd.core.client import engine_dir, identity
from servd.core.executor._remote import WorkerMember, find_model
from servd.ipc import Keys, tcp_address
from servd.join import Join, Left, Welcome, join_of, read_token
from servd.launch.engine_supervisor import EngineSupervisor
from servd.launch.process_tree import (
    ENGINE_STOP_TIMEOUT,
    addresses_of,
    has_terminal,
    head_address,
)
from servd.relay import Member

logger = logging.getLogger("servd.launch")


class GivenUp(Exception):
    """An engine keeps dying. `code`: exit code for this process."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


class EngineMember(Member):
    """An engine of this host. It ends when the connection to the head is lost, as its requests are
    lost, too, and is restarted after joining again.
    """

    def __init__(self, engine: EngineSupervisor, join: Join, *args: Any) -> None:
        self.engine, own = engine, identity(engine.config, engine.spec)
        where = addresses_of({join.rank: engine.ipc_dir})
        super().__init__(head_address(engine.config), join, where, *args, identity=own)

    def begin(self, welcome: Welcome) -> None:
        self.engine.set_incarnation(welcome.incarnation)
        self.engine.start(time.monotonic())

    def left(self) -> Left | None:
        """Why the engine has ended, None while it runs; raises GivenUp if it keeps dying."""
        self.engine.look()
        if (child := self.engine.child) is None or child.exit_code is None:
            return None
        if (why := self.engine.handle_exit()) is not None:
            raise GivenUp(why, 2 if child.exit_code == 2 else 1)
        logger.error("%s: starting it again", self.engine.reason)
        return Left(self.engine.reason, child.heartbeat.computing())

    def end(self) -> None:
        if self.engine.child is not None and self.engine.child.exit_code is None:
            self.engine.terminate()
            self.engine.discard(ENGINE_STOP_TIMEOUT)


def members_of(
    config: Config, spec: hf.ModelSpec, ipc_dir: str, fail: Callable[[Exception], None]
) -> Iterator[Member]:
    """The members of this host, one for each engine or worker. Raises ConfigError: there is no
    token, or no model.
    """
    parallel, keys = config.parallel, Keys(read_token(config))
    if parallel.node_rank:
        spec, size = find_model(config), parallel.num_workers // parallel.nnodes
        at = tcp_address(parallel.master_addr or "", parallel.master_port)
        for rank in range(parallel.node_rank * size, (parallel.node_rank + 1) * size):
            yield WorkerMember(at, join_of(config, spec, rank), keys, spec, size, fail)
        return
    for place in range(parallel.num_engines_here):
        folder = engine_dir(ipc_dir, place)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        engine = EngineSupervisor(config, spec, folder, lambda _: None, place)
        yield EngineMember(engine, join_of(config, spec, engine.rank), keys, fail)


def serve(config: Config, spec: hf.ModelSpec, ipc_dir: str) -> int:
    """Run this host's engines or workers until a signal; returns the exit code. Raises ConfigError:
    the head rejects this host.
    """
    ends: SimpleQueue[int | Exception] = SimpleQueue()
    members, had_terminal = [*members_of(config, spec, ipc_dir, ends.put)], has_terminal()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGHUP or (had_terminal and not has_terminal()):
            ends.put(0)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, on_signal)
    logger.info("joining %s with numbers %s", members[0].head, [each.rank for each in members])
    for each in members:
        each.start()
    end = ends.get()
    for each in members:
        each.closing.set()
    for each in members:
        each.close()
    if isinstance(end, GivenUp):
        logger.error("%s: stopping", end)
        return end.code
    if isinstance(end, Exception):
        raise end
    return end
