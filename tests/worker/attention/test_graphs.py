"""Backends with `supports_graphs`: metadata is made once, and its tensors change afterwards."""

import dataclasses

import pytest
import torch

from servd.base import plugins
from servd.messages.engine import NewRequest
from servd.messages.params import SamplingParams
from servd.worker.attention import AttentionBackend, AttentionBatch, AttentionSpec, make_backend
from servd.worker.batch.input_batch import decode_attention
from servd.worker.batch.request_states import RequestStates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE, TOLERANCE = (torch.bfloat16, 3e-2) if DEVICE.type == "cuda" else (torch.float32, 1e-5)
NUM_HEADS = 4
HEADS = {"gqa": (2, 32, None), "padded": (2, 24, None), "latent": (1, 40, 32)}
BLOCK_SIZE = 16
MAX_LEN = 96
STEPS = [
    ([0, 1, 2, 3], [40, 0, 95, 15]),
    ([2, 0], [16, 79]),
    ([1, 3, 0], [94, 1, 31]),
]  # slots, positions
NUM_ROWS = 4  # the graph's


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [heads, head_dim] over keys and values [tokens, kv_heads, head_dim], in float64."""
    keys, values = (
        part.double().repeat_interleave(NUM_HEADS // part.shape[1], 1) for part in (keys, values)
    )
    weights = (torch.einsum("hd,khd->hk", q.double(), keys) * scale).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, values)


def replace_contents(batch: AttentionBatch, other: AttentionBatch) -> None:
    """What a graph's first kernels do: same tensors, new numbers. What is on the host stays."""
    for field in dataclasses.fields(batch):
        old = getattr(batch, field.name)
        new = getattr(other, field.name)
        if isinstance(old, torch.Tensor):
            assert old.shape == new.shape
            old.copy_(new)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 20], ids=lambda w: f"window={w}")
@pytest.mark.parametrize("name", plugins.names("servd.worker.attention"))
def test_later_steps_are_right_too(name: str, window: int | None, heads: str):
    num_kv_heads, head_dim, value_dim = HEADS[heads]
    spec = AttentionSpec(
        num_heads=NUM_HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=BLOCK_SIZE,
        sliding_window=window,
        dtype=DTYPE,
        kv_dtype=DTYPE,
        device=DEVICE,
    )
    backend_class = plugins.load_class("servd.worker.attention", name, AttentionBackend)
    if (reason := backend_class.supports(spec)) or not backend_class.supports_graphs:
        pytest.skip(f"{name}: {reason or 'cannot be captured'}")
    _, backend = make_backend(name, spec)
    states = RequestStates(4, MAX_LEN, BLOCK_SIZE, DEVICE, vocab_size=100)
    generator = torch.Generator(DEVICE).manual_seed(3)
    blocks_each = MAX_LEN // BLOCK_SIZE
    null_block = 4 * blocks_each
    blocks = torch.randperm(null_block, generator=generator, device=DEVICE).view(4, -1).tolist()
    for slot in range(4):
        states.add(NewRequest(slot, [0], 1, 0, blocks[slot], SamplingParams()))
    states.block_tables.apply(torch.from_numpy(states.block_tables.take_changes()).to(DEVICE))
    states.block_tables.tables[states.null_slot] = null_block

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE).to(DTYPE)

    cache = random(*backend.kv_cache_shape(null_block + 1))
    padding = torch.tensor([[states.null_slot], [0]], device=DEVICE)
    batch = decode_attention(states, *padding.repeat(1, NUM_ROWS), is_captured=True)
    metadata = backend.build_metadata(batch)
    for slots, positions in STEPS:
        inputs = padding.repeat(1, NUM_ROWS)
        inputs[:, : len(slots)] = torch.tensor([slots, positions], device=DEVICE)
        replace_contents(batch, decode_attention(states, *inputs, is_captured=True))
        before = cache.clone()
        q, k, v = (
            random(NUM_ROWS, NUM_HEADS, head_dim),
            *random(2, NUM_ROWS, num_kv_heads, head_dim),
        )
        stored = [k, v] if value_dim is None else [k]
        queries = backend.write(q, k, None if value_dim else v, cache, metadata, None)
        out = backend.attend(queries, cache, metadata, 0.3, None)
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            # [MAX_LEN, kv_heads, head_dim] each
            parts = before[:, blocks[slot]].flatten(1, 2).clone()
            for part, x in zip(parts, stored, strict=True):
                part[position] = x[row]
            keys = parts[0]
            values = parts[-1][..., -(value_dim or head_dim) :]
            visible = slice(max(0, position + 1 - (window or MAX_LEN)), position + 1)
            expected = attend(q[row], keys[visible], values[visible], 0.3)
            torch.testing.assert_close(out[row].double(), expected, atol=TOLERANCE, rtol=0)
            assert torch.equal(
                cache[:, blocks[slot][position // BLOCK_SIZE], position % BLOCK_SIZE],
                torch.stack([x[row] for x in stored]),
            )
        changed = (cache != before).flatten(3).any(-1).sum(dim=(1, 2))
        assert (changed <= len(slots) + 1).all(), (
            "nothing but the rows' tokens and the block of padding"
        )
