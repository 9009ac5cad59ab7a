"""StatLogger: the engine's line about its throughput."""

import logging
import re

import pytest

from servd.base.tracing import StepRecord
from servd.core import stat_logger
from servd.core.stat_logger import StatLogger
from servd.messages.engine import EngineCoreOutput, EngineCoreOutputs
from servd.messages.stats import SchedulerStats

SECOND = 1_000_000_000


def test_the_chunks_of_a_long_prompt_have_a_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Chunks of two seconds; with the last five, another request gets three tokens each."""
    caplog.set_level(logging.INFO, "servd.engine")
    now = 0
    monkeypatch.setattr(stat_logger, "now_ns", lambda: now)
    stats_log = StatLogger()
    for num_outputs in [0] * 10 + [3] * 5:
        now += 2 * SECOND
        outputs = [EngineCoreOutput("a", [7] * num_outputs)]
        steps = [StepRecord(0, now - 2 * SECOND)]
        stats = SchedulerStats(num_prompt_tokens=512)
        stats_log.log_stats(EngineCoreOutputs(outputs, stats, steps))
    now += 3600 * SECOND  # idle
    stats_log.log_stats(EngineCoreOutputs([], SchedulerStats()))
    rates = [re.findall(r"([\d.]+) \w+ tok/s", message) for message in caplog.messages]
    assert rates == [["0.0", "256.0"], ["0.0", "256.0"], ["1.5", "256.0"]]
