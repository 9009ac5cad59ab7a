"""Workers on other hosts: what their executor and these hosts do, whoever chooses them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping

import msgspec

from servd import hf
from servd.child import Child
from servd.child_messages import StartWorker
from servd.config import Config
from servd.core.executor.multiproc import STOP_TIMEOUT, MultiProcExecutor
from servd.ipc import Keys, address
from servd.join import Join, Left, Welcome
from servd.private_dir import private_dir
from servd.relay import Addresses, Head, Member

ONLY_CLIENT = 0  # of a worker: its executor


class RemoteExecutor(MultiProcExecutor):
    """Workers of other hosts seem to be here. A subclass says where they join, in `start`."""

    head: Head | None = None

    @classmethod
    def prepare(cls, num_workers: int) -> None:
        """Nothing: their hosts do."""

    def listen(self, at: str, terms: Callable[[], Mapping[str, str]], keys: Keys) -> str:
        """Let workers join. Returns where. One that is lost takes the model with it."""
        addresses = Addresses(lambda rank, _: self.address_of(rank), lambda *_: self.inbox.at)
        start = msgspec.msgpack.encode(self.start_message(-1))
        others = range(self.num_here, self.config.parallel.num_workers)
        self.head = Head(
            at, others, addresses, terms, keys, lambda _, restarting: self.lose(restarting.reason),
            lambda error: self.lose(f"the link to other hosts failed: {error!r}"), start,
        )  # fmt: skip
        self.head.start()
        self.progress("waiting for other hosts", 0.0)
        return self.head.listener.at

    def shutdown(self) -> None:
        """Stop the workers here; those of other hosts end as soon as nobody is there for them."""
        super().shutdown()
        if self.head is not None:
            self.head.close()


def find_model(config: Config) -> hf.ModelSpec:
    """The model on this host, with its weights. Raises ConfigError: it is not here, and cannot be
    had.
    """
    model = config.model
    assert model.model is not None
    folder = hf.find_model(model.model, model.revision, model.download_dir)
    spec = hf.read_spec(folder, model.hf_overrides)
    if model.load_format != "dummy":
        hf.download_weights(model.model, model.revision, model.download_dir, model.load_format)
    return spec


class WorkerMember(Member):
    """A worker for an executor on another host, for as long as that is there. `at`: where it
    listens; `keys`: of the token; `num_here`: workers of this host, which share its CPUs.
    """

    def __init__(
        self,
        at: str,
        join: Join,
        keys: Keys,
        spec: hf.ModelSpec,
        num_here: int,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.folder, self.spec, self.num_here = private_dir(), spec, num_here
        self.worker: Child | None = None
        inbox, outbox = address(self.folder, "worker"), address(self.folder, "executor")
        addresses = Addresses(lambda *_: inbox, lambda *_: outbox)
        super().__init__(at, join, addresses, keys, on_failure, clients=[ONLY_CLIENT])

    def begin(self, welcome: Welcome) -> None:
        start = msgspec.msgpack.decode(welcome.start, type=StartWorker)
        inbox, outbox = self.addresses.process(0, 0), self.addresses.client(0, 0)
        start = msgspec.structs.replace(
            start, rank=self.rank, spec=self.spec, inbox=inbox, outbox=outbox
        )
        num_threads = str(max((os.cpu_count() or 1) // self.num_here, 1))
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads)}
        module = MultiProcExecutor.worker_module
        self.worker = Child(f"worker-{self.rank}", module, start, env=env)

    def left(self) -> Left | None:
        if self.worker is None or self.worker.exit_code is None:
            return None
        return Left(f"{self.worker.name} ended with exit code {self.worker.exit_code}")

    def end(self) -> None:
        """Whatever it does: nobody is there for it."""
        if self.worker is not None:
            self.worker.stop(STOP_TIMEOUT)
            self.worker = None

    def run(self) -> None:
        super().run()
        shutil.rmtree(self.folder, ignore_errors=True)
