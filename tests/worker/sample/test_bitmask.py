import numpy as np
import pytest
import torch

from servd.worker.sample.bitmask import apply_bitmask


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_exactly_the_tokens_whose_bit_is_set_survive(vocab_size):
    rng = np.random.default_rng(vocab_size)
    allowed = rng.random((6, vocab_size)) < 0.5
    padded = np.zeros((6, -(-vocab_size // 32) * 32), dtype=bool)
    padded[:, :vocab_size] = allowed
    bitmask = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view("<i4").copy())
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    masked = logits.clone()
    apply_bitmask(masked, bitmask)
    keep = torch.from_numpy(allowed)
    assert torch.equal(masked[keep], logits[keep])
    assert bool((masked[~keep] == float("-inf")).all())
