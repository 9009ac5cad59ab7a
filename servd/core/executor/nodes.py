"""NodesExecutor: worker processes on --nnodes hosts, which join this one at --master-addr."""

from __future__ import annotations

from functools import partial

from servd.core.executor._remote import RemoteExecutor
from servd.ipc import Keys, tcp_address
from servd.join import read_token, terms_of
from servd.messages import WorkerReady


class NodesExecutor(RemoteExecutor):
    """Each host has an equal part of the workers, this one the first."""

    @property
    def num_here(self) -> int:
        return self.config.parallel.num_workers // self.config.parallel.nnodes

    @property
    def meeting_point(self) -> str:
        """Of torch.distributed, which neither asks for a token nor encrypts."""
        parallel = self.config.parallel
        return tcp_address(parallel.master_addr or "", parallel.master_port + 1)

    def start(self) -> WorkerReady:
        parallel, terms = self.config.parallel, partial(terms_of, self.config, self.spec)
        at = tcp_address(parallel.master_addr or "", parallel.master_port)
        self.listen(at, terms, Keys(read_token(self.config)))
        return super().start()


Executor = NodesExecutor  # the name that every file of this package has
