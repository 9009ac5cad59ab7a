"""Two ranks draft what one does."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from servd.checkpoint.model_spec import read_spec
from servd.messages.engine import NewRequest, ScheduledRequest, SchedulerOutput
from servd.worker.worker import Worker
from tests.parity.families import CASES, make_checkpoint
from tests.worker.driver import GREEDY, config_for
from tests.worker.spec_decode import checkpoints

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
NUM_DRAFTS = 3


def draft(
    rank: int, size: int, target: str, speculative: dict[str, Any], address: str | None, result: str
) -> None:
    """Run one rank; write what it drafts after a prompt and after the drafts' verification."""
    config = config_for(target, tensor_parallel_size=size, speculative_config=speculative)
    worker = Worker(config, read_spec(target), rank, lambda *_: None, address)
    torch.set_num_threads(1)
    worker.load_model()
    worker.allocate_kv_cache(16)
    new = NewRequest(2, PROMPT, len(PROMPT), 0, [9, 4, 11, 7, 1], GREEDY)
    first = ScheduledRequest(2, len(PROMPT), max_new_drafts=NUM_DRAFTS)
    second = ScheduledRequest(
        2,
        1 + NUM_DRAFTS,
        num_computed_tokens=len(PROMPT),
        num_drafts=NUM_DRAFTS,
        max_new_drafts=NUM_DRAFTS,
    )
    drafts = []
    for step in (SchedulerOutput(1, [first], [new]), SchedulerOutput(2, [second])):
        worker.execute_model(step)
        drafts.append(worker.sample_tokens().result().draft_token_ids[0])
    torch.save(drafts, f"{result}.{rank}")
    worker.shutdown()


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("medusa", "eagle")]


@pytest.mark.parametrize("method", [*SLOW, "eagle3"])
def test_two_ranks_draft_what_one_does(tmp_path: Path, method: str):
    target = make_checkpoint(tmp_path / "model", "llama", CASES["llama"]["llama3 rope"])
    speculative = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    speculative |= getattr(checkpoints, method)(target, tmp_path / "head")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    draft(0, 1, str(target), speculative, None, str(tmp_path / "one"))
    two = str(tmp_path / "two")
    mp.start_processes(
        draft, (2, str(target), speculative, address, two), nprocs=2, start_method="fork"
    )
    expected = torch.load(tmp_path / "one.0")
    assert [len(drafts) for drafts in expected] == [NUM_DRAFTS, NUM_DRAFTS]
    assert torch.load(f"{two}.0") == torch.load(f"{two}.1") == expected
