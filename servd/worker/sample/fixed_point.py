"""Probabilities as integers: exact sums, so that a draw depends on nothing but the row itself.

The weight of a token is its probability relative to the row's most probable one, in units of
2**-44, kept as float32 (whose fraction is ignored). Sums are made in int64, where any order gives
the same result; float sums would depend on how a device splits the row. Over up to 2**18 tokens
they cannot overflow.
"""

WEIGHT_ONE = 2.0**44
MAX_VOCAB_SIZE = 2**18
