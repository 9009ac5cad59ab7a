"""The CPU kernel's own promises: the same bits however a prompt is divided, and little memory for
long contexts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from servd.worker.attention._base import AttentionBatch, AttentionSpec
from servd.worker.attention.native import Backend
from servd.worker.ops.native import library
from tests.worker.attention.paged import Rows

SPEC = AttentionSpec(4, 2, 16, 16, None, torch.float32, torch.float32, torch.device("cpu"))

pytestmark = pytest.mark.skipif(library() is None, reason="servd was installed without a compiler")


@pytest.mark.parametrize("window", [None, 300])
def test_chunks_of_a_prompt_yield_what_the_whole_yields_to_the_bit(window: int | None):
    """Chunks of one part of the context and of several, and of few queries and many."""
    rows = Rows(dataclasses.replace(SPEC, sliding_window=window), [(0, 2100)], rotary=True)
    backend = Backend(rows.spec)
    whole = rows.run(backend)
    cache = torch.zeros(backend.kv_cache_shape(rows.num_blocks))
    cuts = [0, 37, 1024, 1030, 2000, 2001, 2100]
    chunks = [
        rows.step(backend, cache, np.array([first]), np.array([last]))
        for first, last in zip(cuts, cuts[1:], strict=False)
    ]
    assert torch.equal(torch.cat(chunks), whole)


def test_a_prompt_takes_no_memory_for_every_part_of_its_context():
    """A window keeps the work small; 16 queries and 4 million keys would have 300 MB of sums."""
    spec = AttentionSpec(64, 1, 16, 16, 16, torch.float32, torch.float32, torch.device("cpu"))
    num_tokens, num_keys = 16, 1 << 22
    backend = Backend(spec)
    cache = torch.zeros(backend.kv_cache_shape(1))
    metadata = backend.build_metadata(
        AttentionBatch(
            query_lens=np.array([num_tokens]),
            seq_lens=np.array([num_keys]),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens_device=torch.tensor([num_keys], dtype=torch.int32),
            block_tables=torch.zeros(1, num_keys // 16, dtype=torch.int32),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        )
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_kilobytes()
    backend.attend(torch.ones(num_tokens, 64, 16), cache, metadata, 1.0)
    assert peak_kilobytes() - before < 30_000


def peak_kilobytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0])
