"""StatLogger: logs the engine's throughput."""

import logging

from servd.base.tracing import now_ns
from servd.messages.engine import EngineCoreOutputs
from servd.messages.stats import SchedulerStats

logger = logging.getLogger("servd.engine")

LOG_INTERVAL = 10.0  # seconds between log lines while requests run


class StatLogger:
    """Logs one line every LOG_INTERVAL seconds while tokens are produced."""

    def __init__(self) -> None:
        self.since_ns = 0
        self.num_tokens = 0
        self.total = SchedulerStats()  # only prompt tokens and drafts are added

    def log_stats(self, outputs: EngineCoreOutputs) -> None:
        if self.num_tokens == self.total.num_prompt_tokens == 0:  # idle times are no part of it
            self.since_ns = outputs.steps[0].started_ns if outputs.steps else now_ns()
        num_others = sum(len(output.new_token_ids) for output in outputs.outputs)
        self.num_tokens += len(outputs.decoded) + num_others
        if (stats := outputs.stats) is None:
            return
        self.total.num_prompt_tokens += stats.num_prompt_tokens
        drafts = self.total.drafts
        drafts.add(stats.drafts)
        elapsed = (now_ns() - self.since_ns) * 1e-9
        if elapsed < LOG_INTERVAL:
            return
        logger.info(
            "running %d, waiting %d, KV cache %.0f %%, %.1f output tok/s, %.1f prompt tok/s",
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            self.num_tokens / elapsed,
            self.total.num_prompt_tokens / elapsed,
        )
        if num_drafts := drafts.num_drafts:
            accepted = drafts.num_accepted_tokens
            drafted = drafts.num_draft_tokens
            logger.info(
                "drafts: mean acceptance length %.2f, %.1f of %.1f drafted tok/s accepted "
                "(%.0f %%), by position %s",
                1 + accepted / num_drafts,
                accepted / elapsed,
                drafted / elapsed,
                100 * accepted / drafted,
                " ".join(f"{n / num_drafts:.2f}" for n in drafts.num_accepted_tokens_per_pos),
            )
        self.num_tokens = 0
        self.total = SchedulerStats()
