"""Loads: which waiting requests wait for blocks from files and peers, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.disk import Disk
from servd.core.kv_cache.connector.host import HostMemory
from servd.core.kv_cache.connector.io_workers import IOWorkers
from servd.core.request import Request
from servd.stats import SchedulerStats
from servd.tracing import Mark, now_ns

if TYPE_CHECKING:
    from servd.core.kv_cache.connector.remote import RemoteStore

MIN_TIMEOUT_NS = 50_000_000  # for blocks that may also be computed
REQUIRED_TIMEOUT_NS = (
    600 * 10**9
)  # for blocks that must not: their peers have timeouts of their own
NOTHING_TO_LOAD = 0  # as a deadline


@dataclass(slots=True)
class Load:
    """What a waiting request waits for, as it was when it began to wait."""

    hashes: Sequence[bytes]
    deadline_ns: int


class Loads:
    """Reads the blocks of waiting requests into host memory, from where they are copied when the
    request starts. So all that can go wrong with files and peers has happened before that.

    A block of a peer is required if `kv_load_failure_policy` is fail: then a request waits until
    it has all its blocks, or fails. Otherwise it starts after a timeout, and computes the rest.
    """

    def __init__(
        self,
        host: HostMemory,
        disk: Disk | None,
        remote: RemoteStore | None,
        io_workers: IOWorkers,
        costs: LoadCosts,
    ) -> None:
        self.host = host
        self.disk = disk
        self.remote = remote
        self.io_workers = io_workers
        self.costs = costs
        self._loads: dict[Request, Load] = {}
        self._failed: dict[Request, str] = {}

    def is_loading(self, request: Request, hashes: Sequence[bytes]) -> bool:
        """Return whether a request has to wait for these blocks; the first call starts to read
        those that the host lacks.
        """
        peer = find_peer(request)
        load = self._loads.get(request)
        if load is None:
            if self._has_to_queue(hashes, peer):
                return True
            load = Load(hashes, self._start(request, hashes, peer))
            self._loads[request] = load
        elif load.deadline_ns == NOTHING_TO_LOAD:
            return False
        if now_ns() < load.deadline_ns:
            if self._is_being_read(hashes):
                return True
            if self._were_evicted(hashes, peer):
                del self._loads[request]
                return True
        error = self._find_error(hashes, peer)
        if error:
            self._failed[request] = error
        return bool(error)

    def is_required(self, request: Request) -> bool:
        """Return whether a request must not compute the blocks of its peer."""
        return self._is_required(find_peer(request))

    def take_failed(self) -> list[tuple[Request, str]]:
        failed, self._failed = self._failed, {}
        return list(failed.items())

    def stop_waiting(self, request: Request) -> None:
        """A request starts, or ends."""
        self._loads.pop(request, None)
        self._failed.pop(request, None)

    def report(self, stats: SchedulerStats) -> None:
        """Count the requests that wait for blocks, and those whose blocks are there."""
        self.io_workers.collect_finished()
        for load in self._loads.values():
            if load.deadline_ns == NOTHING_TO_LOAD:
                continue
            if now_ns() < load.deadline_ns and self._is_being_read(load.hashes):
                stats.num_reading += 1
            else:
                stats.num_read += 1

    def _start(self, request: Request, hashes: Sequence[bytes], peer: str) -> int:
        """Read the first of these blocks that the host lacks, from a peer or else from files.

        Returns:
            the deadline, or NOTHING_TO_LOAD.
        """
        self.io_workers.collect_finished()
        source = self._find_source(peer)
        missing = self._find_missing(hashes)
        if source is None or not missing or self.io_workers.is_hung:
            return NOTHING_TO_LOAD
        if missing[0] not in self.io_workers.reading:
            slots = self._take_slots(source, hashes, missing, self._is_required(peer))
            if not slots:
                return NOTHING_TO_LOAD
            self.io_workers.read(source, peer, slots)
        now = now_ns()
        request.marks.append(Mark("reading", now))
        if self._is_required(peer):
            return now + REQUIRED_TIMEOUT_NS
        return now + MIN_TIMEOUT_NS + round(len(missing) * self.costs.compute_ns)

    def _take_slots(
        self,
        source: Disk | RemoteStore,
        hashes: Sequence[bytes],
        missing: Sequence[bytes],
        is_required: bool,
    ) -> dict[bytes, int]:
        """Return slots for the first `missing` blocks, as far as there is room for them and the
        source may have them.
        """
        slots: dict[bytes, int] = {}
        if not source.may_have(missing[0]):
            return slots
        if not is_required and not self.costs.is_worth_loading(source.name):
            return slots
        found = self.host.find_prefix(hashes)
        self.host.share(found)  # these must not make room
        for block_hash in missing:
            if self.host.num_free == 0 or not source.may_have(block_hash):
                break
            [slots[block_hash]] = self.host.take(1)
        self.host.release(found)
        return slots

    def _find_source(self, peer: str) -> Disk | RemoteStore | None:
        if peer and self.remote is not None:
            return self.remote
        return self.disk

    def _is_required(self, peer: str) -> bool:
        return bool(peer) and self.remote is not None and self.remote.is_strict

    def _has_to_queue(self, hashes: Sequence[bytes], peer: str) -> bool:
        """Return whether required blocks have to wait for the loads of others, which may need all
        slots that there are.
        """
        self.io_workers.collect_finished()
        missing = self._find_missing(hashes)
        if not missing or not self._is_required(peer) or self.io_workers.is_hung:
            return False
        if self.io_workers.reading:
            return True
        found = self.host.find_prefix(hashes)
        num_idle = sum(self.host.ref_counts[slot] == 0 for slot in found)
        return self._fits(hashes) and self.host.num_free - num_idle < len(missing)

    def _is_being_read(self, hashes: Sequence[bytes]) -> bool:
        """Return whether the first of these blocks that the host lacks is being read."""
        self.io_workers.collect_finished()
        missing = self._find_missing(hashes)
        return bool(missing) and missing[0] in self.io_workers.reading

    def _were_evicted(self, hashes: Sequence[bytes], peer: str) -> bool:
        """Return whether required blocks are not here although no peer has refused them: they made
        room for others after they came.
        """
        missing = self._find_missing(hashes)
        if not missing or not self._is_required(peer) or not self._fits(hashes):
            return False
        return self.io_workers.missed.isdisjoint(missing) and not self.io_workers.is_hung

    def _find_error(self, hashes: Sequence[bytes], peer: str) -> str:
        """Return why a request fails that waited for these blocks; "" if it does not."""
        missing = self._find_missing(hashes)
        if not missing or not self._is_required(peer):
            return ""
        if self._fits(hashes):
            reason = f"could not be had from {peer}"
            hint = "send the prompt to be computed once more"
        else:
            reason = f"have no place among the {self.host.num_blocks} of host memory"
            hint = "raise --kv-offloading-size"
        return (
            f"{len(missing)} of {len(hashes)} KV blocks {reason}, "
            f"and kv_load_failure_policy is fail: {hint}"
        )

    def _find_missing(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return the blocks from the first on that the host lacks."""
        return hashes[len(self.host.find_prefix(hashes)) :]

    def _fits(self, hashes: Sequence[bytes]) -> bool:
        return len(hashes) <= self.host.num_blocks


def find_peer(request: Request) -> str:
    """Return the engine that a request's blocks may come from; "" after a preemption: then they
    are computed here.
    """
    is_first = request.num_preemptions == 0 and request.num_output_tokens == 0
    return request.kv_source if is_first else ""
