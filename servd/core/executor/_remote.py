"""Workers on other hosts: what their executor and these hosts do, whoever chooses them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue

import msgspec

from servd import hf
from servd.child import Child
from servd.child_messages import StartWorker
from servd.config import Config
from servd.core.executor.multiproc import STOP_TIMEOUT, MultiProcExecutor
from servd.head_relay import HeadRelay
from servd.ipc import Keys, address, private_dir
from servd.join import Join
from servd.messages import WorkerFailed
from servd.node_relay import NodeRelay
from servd.relay import Places

ONLY_CLIENT = 0  # of a worker: its executor


class WorkersRelay(HeadRelay):
    """The executor's end. A host that is lost takes the model with it."""

    on_lost: Callable[[str], None]

    def tell_lost(self, rank: int, why: str) -> None:
        """As the worker would before it ends."""
        self.tell(rank, ONLY_CLIENT, WorkerFailed(why))
        self.on_lost(why)


class RemoteExecutor(MultiProcExecutor):
    """Workers of other hosts seem to be here. A subclass says where they join, in `start`."""

    relay: WorkersRelay | None = None

    @classmethod
    def prepare(cls, num_workers: int) -> None:
        """Nothing: their hosts do."""

    def listen(self, at: str, terms: Mapping[str, str], keys: Keys) -> WorkersRelay:
        """Let hosts join; see HeadRelay."""
        places = Places(
            lambda rank, _: address(self.folder, f"worker-{rank}"), lambda *_: self.inbox.at
        )
        start = msgspec.Raw(msgspec.msgpack.encode(self.start_message(-1, "")))
        others = range(self.num_here, self.config.parallel.num_workers)
        self.relay = WorkersRelay(at, terms, others, places, keys, self._relay_failed, start)
        self.relay.on_lost = self._host_lost
        self.relay.add(ONLY_CLIENT)
        self.relay.start()
        self.progress("waiting for other hosts", 0.0)
        return self.relay

    def _relay_failed(self, error: Exception) -> None:
        self.on_failure(f"the link to other hosts failed: {error!r}")

    def _host_lost(self, why: str) -> None:
        if not self.is_stopping:
            self.on_failure(why)

    def shutdown(self) -> None:
        """Stop the workers here; those of other hosts end as soon as nobody is there for them."""
        super().shutdown()
        if self.relay is not None:
            self.relay.close()


def find_model(config: Config) -> hf.ModelSpec:
    """The model on this host, with its weights.

    Raises:
        ConfigError: it is not here, and cannot be had.
    """
    model = config.model
    assert model.model is not None
    spec = hf.read_spec(hf.find_model(model.model, model.revision, model.download_dir))
    if model.load_format != "dummy":
        hf.download_weights(model.model, model.revision, model.download_dir, model.load_format)
    return spec


class WorkerHost:
    """Workers for an executor on another host, for as long as that is there.

    Args:
        at: where it listens.
        join: what is said of this host.
        keys: of the token.
        find: the model on this host, by the options of the executor or its own.
    """

    def __init__(
        self, at: str, join: Join, keys: Keys, find: Callable[[Config], hf.ModelSpec] = find_model
    ) -> None:
        self.folder, self.ranks, self.find = private_dir(), join.ranks, find
        self.events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.workers: list[Child] = []
        self.is_over = False
        places = Places(
            lambda rank, _: address(self.folder, f"worker-{rank}"),
            lambda rank, _: address(self.folder, f"executor-{rank}"),
        )
        self.relay = NodeRelay(
            at, join, places, "", keys,
            lambda _, start: self.events.put(partial(self._begin, start)),
            lambda why: self.events.put(self._end),
            lambda error: self.events.put(partial(_raise, error)),
            [ONLY_CLIENT],
        )  # fmt: skip

    def run(self) -> None:
        """Until `stop`.

        Raises:
            ConfigError: the executor does not take this host, or the model is not here.
        """
        self.relay.start()
        try:
            while not self.is_over:
                self.events.get()()
        except Exception as error:
            self.relay.reason = str(error)
            raise
        finally:
            self.relay.close()
            self._stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """End `run`; from any thread, and from signal handlers."""
        self.events.put(partial(setattr, self, "is_over", True))

    def _begin(self, message: msgspec.Raw) -> None:
        start = msgspec.msgpack.decode(message, type=StartWorker)
        spec = self.find(start.config)
        # The executor's options count all workers, and this host has some.
        num_threads = max((os.cpu_count() or 1) // len(self.ranks), 1)
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads))}
        for rank in self.ranks:
            own = msgspec.structs.replace(
                start, rank=rank, spec=spec, inbox=address(self.folder, f"worker-{rank}"),
                outbox=address(self.folder, f"executor-{rank}"),
            )  # fmt: skip
            module = MultiProcExecutor.worker_module
            worker = Child(f"worker-{rank}", module, own, env=env)
            worker.on_exit(lambda child: self.events.put(partial(self._ended, child)))
            self.workers.append(worker)

    def _ended(self, worker: Child) -> None:
        """The others wait for it in vain."""
        if worker in self.workers:
            self.relay.reason = f"{worker.name} ended with exit code {worker.exit_code}"
            self.relay.orders.put(self.relay.leave)
            self._end()

    def _end(self) -> None:
        """Nobody is there for the workers; join again."""
        self._stop()
        self.relay.rejoin()

    def _stop(self) -> None:
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.stop(STOP_TIMEOUT)


def _raise(error: Exception) -> None:
    raise error
