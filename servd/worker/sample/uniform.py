"""Random numbers from (seed, position), equal on every device and in every batch."""

from torch import Tensor


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return numbers in [0, 1) with 53 random bits, [n] float64: splitmix64 started at a scrambled
    seed, advanced to the position. `seeds`: [n] int64; `positions`: [n] int64.
    """
    bits = splitmix64(splitmix64(seeds, 0), positions)
    return _shift_right(bits, 11).double() * 2.0**-53


def splitmix64(state: Tensor, index: Tensor | int) -> Tensor:
    """Return output number `index` (from 0) of splitmix64 (Steele et al., 2014) started at `state`;
    int64 stands for uint64.
    """
    z = state + (index + 1) * _signed(0x9E3779B97F4A7C15)  # int64 arithmetic wraps modulo 2**64
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # >> alone would copy the sign bit


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
