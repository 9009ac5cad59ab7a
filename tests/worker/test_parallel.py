"""Two ranks give the logits and tokens of one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from servd.hf import read_spec
from servd.messages import NewRequest, ScheduledRequest, SchedulerOutput
from servd.worker.worker import Worker
from tests.parity.families import CASES, GPT2, LLAMA, QWEN3_MOE, greedy, make_checkpoint
from tests.worker.driver import GREEDY, config_for

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
NUM_OUTPUTS = 8


def generate(rank: int, size: int, folder: str, address: str | None, result: str) -> None:
    """Run one rank of a model; write its tokens and the logits of its first step."""
    worker = Worker(
        config_for(folder, tensor_parallel_size=size),
        read_spec(folder),
        rank,
        lambda *_: None,
        address,
    )
    torch.set_num_threads(1)
    worker.load_model()
    worker.allocate_kv_cache(16)
    new = NewRequest(
        slot=2,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=[],
        params=GREEDY,
    )
    first = ScheduledRequest(2, len(PROMPT), [9, 4, 11])
    worker.execute_model(SchedulerOutput(1, [first], [new]))
    assert worker.runner.launched is not None and worker.runner.launched.computed is not None
    logits = worker.runner.model.compute_logits(worker.runner.launched.computed[1][-1:])
    tokens = worker.sample_tokens().result().sampled_token_ids[0]
    for step in range(2, NUM_OUTPUTS + 1):
        needs_block = (len(PROMPT) + step - 1) % 4 == 1
        blocks, computed = [step] if needs_block else [], len(PROMPT) + step - 2
        row = ScheduledRequest(2, 1, blocks, num_computed_tokens=computed)
        worker.execute_model(SchedulerOutput(step, [row]))
        tokens += worker.sample_tokens().result().sampled_token_ids[0]
    torch.save((tokens, logits), f"{result}.{rank}")
    worker.shutdown()


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("gpt2", GPT2 | {"n_inner": 71}, marks=pytest.mark.slow),
        ("llama", LLAMA | {"attention_bias": True}),
        ("qwen3_moe", QWEN3_MOE),
        *(
            pytest.param(name, next(iter(CASES[name].values())), marks=pytest.mark.slow)
            for name in ("gemma2", "gemma3_text", "granite", "mixtral", "olmo2", "smollm3")
        ),
    ],
)
def test_two_ranks_equal_one(tmp_path: Path, model_type: str, options: dict[str, object]):
    folder = make_checkpoint(tmp_path / "model", model_type, options)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    generate(0, 1, str(folder), None, str(tmp_path / "one"))
    mp.spawn(generate, (2, str(folder), f"tcp://127.0.0.1:{port}", str(tmp_path / "two")), nprocs=2)
    tokens, logits = torch.load(tmp_path / "one.0")
    assert PROMPT + tokens == greedy(folder, PROMPT, NUM_OUTPUTS)
    for rank in range(2):
        tokens_of_rank, logits_of_rank = torch.load(tmp_path / f"two.{rank}")
        assert tokens_of_rank == tokens
        torch.testing.assert_close(logits_of_rank, logits, atol=1e-4, rtol=0)
