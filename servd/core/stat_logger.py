"""StatLogger: logs the engine's throughput."""

import logging
import time

from servd.messages.engine import EngineCoreOutputs
from servd.messages.stats import DraftStats

logger = logging.getLogger("servd.engine")

LOG_INTERVAL = 10.0  # seconds between log lines while requests run


class StatLogger:
    """Logs one line every LOG_INTERVAL seconds while tokens are produced."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.num_tokens = 0
        self.drafts = DraftStats()

    def log_stats(self, outputs: EngineCoreOutputs) -> None:
        if self.num_tokens == 0:  # idle times are not part of the rate
            self.since = time.monotonic()
        self.num_tokens += len(outputs.decoded)
        for output in outputs.outputs:
            self.num_tokens += len(output.new_token_ids)
        if (stats := outputs.stats) is None:
            return
        if stats.drafts.num_drafts:
            self.drafts.add(stats.drafts)
        elapsed = time.monotonic() - self.since
        if elapsed < LOG_INTERVAL:
            return
        logger.info(
            "running %d, waiting %d, KV cache %.0f %%, %.1f output tok/s",
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            self.num_tokens / elapsed,
        )
        if drafts := self.drafts.num_drafts:
            accepted = self.drafts.num_accepted_tokens
            drafted = self.drafts.num_draft_tokens
            logger.info(
                "drafts: mean acceptance length %.2f, %.1f of %.1f drafted tok/s accepted "
                "(%.0f %%), by position %s",
                1 + accepted / drafts,
                accepted / elapsed,
                drafted / elapsed,
                100 * accepted / drafted,
                " ".join(f"{n / drafts:.2f}" for n in self.drafts.num_accepted_tokens_per_pos),
            )
        self.num_tokens = 0
        self.drafts = DraftStats()
