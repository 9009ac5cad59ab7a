"""SchedulerStats and its parts: the counts that an engine reports with its outputs."""

from itertools import zip_longest
from typing import Self

import msgspec


class Stats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The base class of all counts. Positional on the wire, like messages."""


class DraftStats(Stats):
    """The counts of the workers' draft tokens, and of accepted draft tokens."""

    num_drafts: int = 0  # rows with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []

    def count(self, num_tokens: int, num_accepted: int) -> None:
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (num_tokens - len(per_pos))
        for position in range(num_accepted):
            per_pos[position] += 1
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted

    def add(self, other: Self) -> None:
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        pairs = zip_longest(
            self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0
        )
        self.num_accepted_tokens_per_pos = [sum(pair) for pair in pairs]


class BlockEviction(Stats):
    """The eviction of a cached block. Times are in nanoseconds."""

    lifetime_ns: int
    idle_ns: int  # since the block was last found in the prefix cache, or filled
    reuse_gaps_ns: list[int] = []  # between the block's hits


class KVStoreStats(Stats):
    """The state of a storage of the KV connector. Counters start with the engine."""

    name: str
    num_blocks: int = 0
    max_blocks: int = 0
    num_bytes: int = 0  # on the disk, other engines' bytes too
    max_bytes: int = 0
    num_hits: int = 0  # blocks that were loaded
    num_bad: int = 0  # blocks that were damaged, or of another model
    is_skipped: bool = False  # computing a block is faster


class SchedulerStats(Stats):
    """The engine's state after a step, for metrics and logs. Counters are since the last report."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    step_tokens: list[int] = []  # new tokens of outputs and their prompts, by step
    step: int = 0
    drafts: DraftStats = msgspec.field(default_factory=DraftStats)
    num_deferred: int = 0  # requests that cannot run yet, e.g. while a grammar compiles
    evictions: list[BlockEviction] = []  # under --kv-cache-metrics
    running_adapters: list[str] = []  # names, of running requests
    waiting_adapters: list[str] = []  # names, of waiting requests
    external_prefix_cache_queries: int = 0  # tokens looked up by the KV connector
    external_prefix_cache_hits: int = 0  # tokens that the KV connector loaded
    num_swapped: int = 0  # preempted waiting requests; the KV connector may have their blocks
    kv_stores: list[KVStoreStats] = []
    at_ns: int = 0  # time of the report
    num_failed: int = 0  # requests that ended with an error of the workers
    num_bytes_loaded: int = 0  # copied from host memory
    num_bytes_stored: int = 0  # copied to host memory
    num_stores_skipped: int = 0  # blocks without room in host memory
    num_reading: int = 0  # waiting requests whose blocks are being read from files
    num_read: int = 0  # waiting requests whose blocks have been read
    num_pinned: int = 0  # blocks
    num_prompt_tokens: int = 0  # computed, with the chunks of unfinished prompts
    # Models with states: requests that looked for a checkpoint, and that began at one.
    state_cache_queries: int = 0
    state_cache_hits: int = 0
    num_state_evictions: int = 0  # checkpoints
    num_checkpoints: int = 0  # that are cached or in use
    state_cache_bytes: int = 0  # of these, on all devices
    max_state_cache_bytes: int = 0
