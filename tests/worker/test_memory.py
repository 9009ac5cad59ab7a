"""Memory of a device: what a profile run finds, and advice that is enough and no more than that."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.base.errors import NotEnoughMemory
from servd.checkpoint.model_spec import read_spec
from servd.config.cache import CacheConfig
from servd.config.speculative import MAX_GRAMMAR_TOKENS
from servd.worker.device.memory import MemoryUse
from servd.worker.runner.graph_runner import mixed_sizes
from servd.worker.worker import Worker
from tests.worker.driver import config_for
from tests.worker.recorded import RecordedRunner, use_recorded_runner, write_config

GB = 10**9
sizes = st.integers(0, 20 * GB)
uses = st.builds(
    MemoryUse,
    total=st.integers(16 * GB, 140 * GB),
    outside=sizes,
    persistent=sizes,
    per_request=st.integers(0, GB),
    forward=sizes,
    sampling=sizes,
    graphs=sizes,
    utilization=st.sampled_from([0.3, 0.8, 0.9]),
    max_num_seqs=st.integers(1, 300),
)


@given(use=uses, missing=st.integers(1, 10 * GB))
def test_advice_is_enough_and_no_more_than_that(use: MemoryUse, missing: int):
    advice = " ".join(use.hints(missing))
    if match := re.search(r"lower --max-num-seqs to (\d+)", advice):
        num_seqs = int(match[1])
        assert 1 <= num_seqs < use.max_num_seqs
        assert use.freed_with(num_seqs) >= missing
        assert num_seqs + 1 == use.max_num_seqs or use.freed_with(num_seqs + 1) < missing
    else:
        assert use.max_num_seqs == 1 or use.freed_with(1) < missing
    if match := re.search(r"raise --gpu-memory-utilization to ([\d.]+)", advice):
        assert use.utilization < float(match[1]) <= 1
        more = dataclasses.replace(use, utilization=float(match[1]))
        assert more.available - use.available >= missing - 1
    assert advice


class ScriptedMeter:
    """Says what it is told to say."""

    total = 100_000_000

    def __init__(self) -> None:
        self.said = {
            "allocated": [
                1_000_000,
                1_400_000,
                1_900_000,
                7_800_000,
            ],  # weights; with a cache; with what sampling keeps; at the end
            "peak": [0, 5_000_000, 6_000_000, 0, 4_000_000, 9_900_000],
            "used": [
                20_000_000,
                23_000_000,
                23_500_000,
                25_000_000,
                10_000_000,
            ],  # before graphs, after two, after the one of most requests, without any
            "held": [8_000_000, 8_000_000],
        }

    def __getattr__(self, name: str):
        return lambda: self.said[name].pop(0)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker whose runner finds its memory with a ScriptedMeter."""
    use_recorded_runner(monkeypatch)
    monkeypatch.setattr(RecordedRunner, "meter", lambda self: ScriptedMeter())
    config = config_for(
        write_config(tmp_path),
        load_format="dummy",
        kv_cache_memory=None,
        gpu_memory_utilization=0.5,
    )
    return Worker(config, read_spec(tmp_path), 0, lambda *_: None)


@pytest.mark.parametrize("staged", [0, 50_000], ids=["", "with swaps of blocks"])
def test_the_profile_runs_the_largest_steps(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, staged: int
):
    monkeypatch.setattr("servd.worker.runner.gpu_model_runner.STAGED_BYTES", staged)
    monkeypatch.setattr(CacheConfig, "has_connector", bool(staged))
    steps = []
    execute_model = RecordedRunner.execute_model

    def spy(self, scheduled):
        steps.append([row.num_scheduled_tokens for row in scheduled.rows])
        execute_model(self, scheduled)

    monkeypatch.setattr(RecordedRunner, "execute_model", spy)
    ready = worker.load_model()
    assert [step for step in steps if step] == [
        [128],
        [32] * 8,
    ]  # max_model_len; the budget over max_num_seqs
    use = worker.runner.memory_use
    assert use.outside == 2_000_000
    assert use.persistent == 1_500_000 + 200_000 + staged
    assert (use.forward, use.sampling) == (5_000_000 - 1_900_000, 9_900_000 - 1_900_000)
    # For 1, 2, 4, 8, 16 and all requests, one with as many grammar tokens as it may; and for steps
    # with prompts.
    num_graphs = 6 + len(mixed_sizes(256))
    # Hidden states, slots and columns, and the tokens of all requests.
    buffers = 256 * (48 * 4 + 2 * 8) + 8 * (8 + MAX_GRAMMAR_TOKENS)
    assert use.graphs == 5_000_000 + 500_000 * (num_graphs - 3) + buffers
    assert use.available == 50_000_000 - 2_000_000 - use.persistent - 8_000_000 - use.graphs
    block = ready.kv_bytes_per_block
    assert ready.num_blocks == min(use.available // block - 1, 8 * 32)


def test_too_little_memory_has_advice_in_both_directions(worker, monkeypatch):
    per_block = 4 * read_spec(worker.runner.spec.folder).kv_bytes_per_token(4)
    use = MemoryUse(
        total=1000 * per_block,
        outside=0,
        persistent=300 * per_block,
        per_request=20 * per_block,
        forward=0,
        sampling=0,
        graphs=0,
        utilization=0.3215,
        max_num_seqs=8,
    )
    monkeypatch.setattr(RecordedRunner, "_profile", lambda self, meter: use)
    with pytest.raises(NotEnoughMemory) as error:
        worker.load_model()
    # 20 blocks are left after that of padding; a request needs 32.
    assert re.search(
        r"lower --max-model-len to 80, lower --max-num-seqs to 7 or raise "
        r"--gpu-memory-utilization to 0.34$",
        str(error.value),
    )
