"""Probabilities as integers: their sums are exact, so a draw depends only on its own row.

The weight of a token is its probability relative to the row's most probable token, in units of
2**-44, kept as float32 (without its fraction). Sums use int64, where any order gives the same
result; float sums would depend on how a device splits the row. Sums over fewer than 2**19 tokens
cannot overflow.
"""

WEIGHT_ONE = 2.0**44
MAX_VOCAB_SIZE = 2**19 - 1  # Gemma 3 has 262,208 tokens
