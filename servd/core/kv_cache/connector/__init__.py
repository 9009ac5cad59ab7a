"""KVConnector: loads KV blocks from storage outside the device, and saves blocks there."""

from collections.abc import Sequence

from servd.core.executor import Executor
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.request import Request
from servd.core.step import Step
from servd.messages.engine import BlockSwaps
from servd.messages.stats import SchedulerStats


class KVConnector:
    """The interface between the device's KV cache and other storage. This base class is the null
    connector, for an engine without other storage.

    The scheduler calls `is_loading` until a waiting request may start. Then the manager claims the
    slots of loaded blocks, and the workers copy these slots in the next step.
    """

    def measure_copies(self, executor: Executor) -> None:
        """Measure how fast workers load blocks. Afterwards they have mapped the host memory."""

    max_loads = 0  # blocks and parts of states that a request may load

    def may_have(self, block_hash: bytes) -> bool:
        """Return whether a block, or a part of a state, can probably be loaded."""
        return False

    def is_loading(self, request: Request, num_cached: int) -> bool:
        """Return whether a waiting request must wait for blocks after its first `num_cached`, which
        the device has. The first call starts loading the blocks.
        """
        return False

    def may_be_overtaken(self, request: Request, num_cached: int) -> bool:
        """Return whether other requests may start before `request`, which cannot start."""
        return False

    def take_failed(self) -> list[tuple[Request, str]]:
        """Return the waiting requests that can never start, each with the reason, once."""
        return []

    def swap_out(self, request: Request, now_ns: int) -> None:
        """Note that a request was preempted: its blocks may be evicted."""

    def stop_waiting(self, request: Request) -> None:
        """Note that a waiting request ended."""

    def claim_slots(self, request: Request, num_cached: int) -> list[int]:
        """Return the slots of a starting request's blocks after the first `num_cached`, up to the
        first that is not loaded. The caller must `load` all of them.
        """
        return []

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy claimed slots to blocks of the device before the next step runs."""

    def save_block(self, block: int, block_hash: bytes) -> None:
        """Save a block before it is evicted."""

    def save_request(self, request: Request, pool: BlockPool) -> None:
        """Save the blocks of a request that are worth saving, before they are freed."""

    def load_state(self, slots: Sequence[int], checkpoint: int) -> None:
        """Copy claimed slots to a checkpoint of the device before the next step runs."""

    def save_state(self, checkpoint: int, hashes: Sequence[bytes]) -> None:
        """Save a checkpoint before it is evicted; `hashes`: of its parts."""

    def offer_state(self, checkpoint: int, hashes: Sequence[bytes]) -> None:
        """Save a checkpoint that is cached until it is evicted, if that is worth it."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Drop these blocks from every store: their contents may be wrong."""

    def reset(self) -> None:
        """Drop all blocks that this engine does not share with other engines."""

    @property
    def has_swaps(self) -> bool:
        """Whether blocks wait for `take_swaps`, even if there is nothing to compute."""
        return False

    def take_swaps(self) -> BlockSwaps | None:
        """Return the copies for the step that was just scheduled."""
        return None

    def collect_outputs(self, step: Step) -> None:
        """Process the output of a step. The step's swaps are complete."""

    def wait(self) -> bool:
        """Wait briefly if blocks are being read or written; return whether any are. Called when
        there is nothing to compute.
        """
        return False

    def report(self, stats: SchedulerStats) -> None:
        """Add the state of each storage, and the counts since the last report, to `stats`."""

    def find_problems(self) -> list[str]:
        """Return a message for each inconsistency. Call it between two steps."""
        return []

    def close(self) -> None:
        """Stop serving blocks to other engines."""
