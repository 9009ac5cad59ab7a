"""A Worker without a model, for executors that start real ones; `python -m` runs it as a worker
process.

The name of the model chooses how it fails.
"""

import os

import msgspec

from servd.base.errors import ConfigError
from servd.core.executor.fake import FakeExecutor
from servd.worker import worker_proc


class Worker:
    """A FakeExecutor behind the interface of a Worker."""

    def __init__(self, config, spec, rank, progress, distributed_init=None):
        assert (distributed_init is None) == (config.parallel.tensor_parallel_size == 1)
        self.failure = config.model.model
        self.rank = rank
        self.executor = FakeExecutor(config, spec, progress)

    def load_model(self, plans_memory=True):
        if self.failure == "bad-config":
            raise ConfigError("this machine is too small")
        ready = self.executor.start()
        return msgspec.structs.replace(ready, num_blocks=ready.num_blocks - self.rank)

    def allocate_kv_cache(self, num_blocks, num_checkpoints=0):
        assert num_blocks <= len(self.executor.cache) // self.executor.block_size

    def execute_model(self, scheduled):
        if self.failure == "crash":
            os._exit(3)
        if self.failure == "bug":
            raise ZeroDivisionError("in the model")
        self.executor.execute_model(scheduled)

    def sample_tokens(self, bitmask=None):
        return self if self.failure == "late-bug" else self.executor.sample_tokens(bitmask)

    def result(self):
        raise ZeroDivisionError("on the device")

    def stop_profile(self):
        return f"of rank {self.rank}"

    def shutdown(self):
        self.executor.shutdown()


if __name__ == "__main__":
    worker_proc.main(__spec__.name)
