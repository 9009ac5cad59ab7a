import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.worker.sample.uniform import splitmix64, uniform

MASK = 2**64 - 1
INT64 = st.integers(-(2**63), 2**63 - 1)


def big_int_splitmix64(state: int, index: int) -> int:
    """The published algorithm on Python integers."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_splitmix64_gives_the_published_sequence():
    state = torch.full((5,), 1234567)
    bits = [b & MASK for b in splitmix64(state, torch.arange(5)).tolist()]
    # The well-known first outputs for seed 1234567 (Rosetta Code, "Pseudo-random
    # numbers/Splitmix64").
    assert bits == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(deadline=None)
@given(seed=INT64, position=st.integers(0, 2**31))
def test_uniform_is_the_top_53_bits_of_the_stream_of_a_scrambled_seed(seed, position):
    bits = big_int_splitmix64(big_int_splitmix64(seed & MASK, 0), position)
    value = uniform(torch.tensor([seed]), torch.tensor([position])).item()
    assert value == (bits >> 11) / 2**53
    assert 0 <= value < 1


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbouring_seeds_and_positions_are_independent_and_uniform(vary):
    counter = torch.arange(100_000)
    zeros = torch.zeros(100_000, dtype=torch.int64)
    u = uniform(counter, zeros) if vary == "seed" else uniform(zeros, counter)
    counts = torch.histc(u, bins=100, min=0, max=1)
    chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
    assert 40 < chi_square < 180  # 99 degrees of freedom: 99 +- 14
    serial = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1].item()
    assert abs(serial) < 5 / 100_000**0.5


@pytest.mark.gpu
def test_cuda_gives_the_same_numbers():
    seeds = torch.randint(-(2**62), 2**62, (1000,))
    positions = torch.arange(1000)
    assert torch.equal(uniform(seeds, positions), uniform(seeds.cuda(), positions.cuda()).cpu())
