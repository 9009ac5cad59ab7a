"""Loads: makes waiting requests wait for their blocks from files and peers, for a limited time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from servd.base.tracing import Mark, now_ns
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.disk import Disk
from servd.core.kv_cache.connector.host import HostMemory
from servd.core.kv_cache.connector.io_workers import IOWorkers
from servd.core.kv_cache.connector.remote import RemoteStore, Store
from servd.core.kv_cache.prefix_cache import hashes_to_load
from servd.core.request import Request
from servd.messages.stats import SchedulerStats

MIN_TIMEOUT_NS = 50_000_000  # for blocks that may also be computed
REQUIRED_TIMEOUT_NS = 600 * 10**9  # for blocks that must not be: peers have timeouts of their own
UNDECIDED = -1  # as a deadline
NOTHING_TO_LOAD = 0


@dataclass(slots=True)
class Load:
    source: Store | None
    peer: str  # that its blocks come from; "": they come from files
    is_required: bool  # whether the request fails without these blocks
    deadline_ns: int = UNDECIDED
    # Of all blocks that may come from the host, as of the last look:
    hashes: Sequence[bytes] = ()
    loaded: Sequence[int] = ()  # slots of the first blocks, which the host has
    missing: Sequence[bytes] = ()  # the other blocks


@dataclass(eq=False)
class Loads:
    """Reads the blocks of waiting requests into host memory. Blocks are copied from there when a
    request starts, so that files and peers can only fail before that.

    If `kv_load_failure_policy` is fail, a peer's blocks are required: a request waits for all its
    blocks, or fails. Otherwise it starts after a timeout and computes missing blocks.
    """

    host: HostMemory
    disk: Disk | None
    remote: RemoteStore | None
    io_workers: IOWorkers
    costs: LoadCosts
    _loads: dict[Request, Load] = field(default_factory=dict)
    _failed: dict[Request, str] = field(default_factory=dict)

    def is_loading(self, request: Request, num_cached: int) -> bool:
        load = self._find_load(request)
        if load.deadline_ns == NOTHING_TO_LOAD:
            return False
        self.io_workers.collect_finished()
        load.hashes = hashes_to_load(request, self.costs.block_size, num_cached)
        load.loaded = self.host.find_prefix(load.hashes)
        load.missing = load.hashes[len(load.loaded) :]
        if load.deadline_ns == UNDECIDED:
            if self._has_to_queue(load):
                return True
            load.deadline_ns = self._start(load)
            if load.deadline_ns != NOTHING_TO_LOAD:
                request.marks.append(Mark("reading", now_ns()))
        if load.missing and now_ns() < load.deadline_ns:
            if load.missing[0] in self.io_workers.reading:
                return True
            if self._were_evicted(load):
                load.deadline_ns = UNDECIDED
                return True
        if load.missing and load.is_required:
            self._failed[request] = self._explain_failure(load)
            return True
        return False

    def is_required(self, request: Request) -> bool:
        """Return whether a request must not compute the missing blocks itself."""
        return self._find_load(request).is_required

    def take_failed(self) -> list[tuple[Request, str]]:
        failed, self._failed = self._failed, {}
        return list(failed.items())

    def stop_waiting(self, request: Request) -> None:
        self._loads.pop(request, None)
        self._failed.pop(request, None)

    def report(self, stats: SchedulerStats) -> None:
        """Count the requests that wait for blocks, and the requests whose blocks are loaded."""
        self.io_workers.collect_finished()
        loads = [load for load in self._loads.values() if load.deadline_ns > NOTHING_TO_LOAD]
        for load in loads:
            if now_ns() < load.deadline_ns and not self.io_workers.reading.isdisjoint(load.missing):
                stats.num_reading += 1
        stats.num_read = len(loads) - stats.num_reading

    def _find_load(self, request: Request) -> Load:
        load = self._loads.get(request)
        if load is None:
            # After a preemption all blocks have been here, and are computed if they are gone.
            is_first = request.num_preemptions == 0 and request.num_output_tokens == 0
            if self.remote is not None and request.options.kv_source and is_first:
                load = Load(self.remote, request.options.kv_source, self.remote.is_strict)
            else:
                load = Load(self.disk, "", is_required=False)
            self._loads[request] = load
        return load

    def _has_to_queue(self, load: Load) -> bool:
        """Return whether required blocks must wait for others' loads, which may need all slots."""
        if not load.is_required or not load.missing or self.io_workers.is_hung:
            return False
        if self.io_workers.reading:
            return True
        num_idle = sum(self.host.ref_counts[slot] == 0 for slot in load.loaded)
        return self._fits(load) and self.host.num_free - num_idle < len(load.missing)

    def _start(self, load: Load) -> int:
        """Start reading the first missing blocks. Return the deadline, or NOTHING_TO_LOAD."""
        if load.source is None or not load.missing or self.io_workers.is_hung:
            return NOTHING_TO_LOAD
        if load.missing[0] not in self.io_workers.reading:
            slots = self._take_slots(load, load.source)
            if not slots:
                return NOTHING_TO_LOAD
            self.io_workers.read(load.source, load.peer, slots)
        if load.is_required:
            return now_ns() + REQUIRED_TIMEOUT_NS
        return now_ns() + MIN_TIMEOUT_NS + round(len(load.missing) * self.costs.compute_ns)

    def _take_slots(self, load: Load, source: Store) -> dict[bytes, int]:
        """Return free slots for the first missing blocks, as far as the source may have them."""
        slots: dict[bytes, int] = {}
        if not source.may_have(load.missing[0]):
            return slots
        if not load.is_required and not self.costs.is_worth_loading(source.name):
            return slots
        self.host.share(load.loaded)  # these must not make room
        for block_hash in load.missing:
            if self.host.num_free == 0 or not source.may_have(block_hash):
                break
            [slots[block_hash]] = self.host.take(1)
        self.host.release(load.loaded)
        return slots

    def _were_evicted(self, load: Load) -> bool:
        """Return whether required blocks are missing although no peer refused them. Then the blocks
        were loaded, and evicted for other blocks.
        """
        if not load.is_required or not self._fits(load) or self.io_workers.is_hung:
            return False
        return self.io_workers.missed.isdisjoint(load.missing)

    def _explain_failure(self, load: Load) -> str:
        if self._fits(load):
            reason = f"could not be had from {load.peer}"
            hint = "send the prompt to be computed once more"
        else:
            reason = f"have no place among the {self.host.num_blocks} of host memory"
            hint = "raise --kv-offloading-size"
        return (
            f"{len(load.missing)} of {len(load.hashes)} KV blocks {reason}, "
            f"and kv_load_failure_policy is fail: {hint}"
        )

    def _fits(self, load: Load) -> bool:
        return len(load.hashes) <= self.host.num_blocks
