"""Probabilities as integers: exact sums, so that a draw depends on nothing but its row.

The weight of a token is its probability relative to the row's most probable token, in units of
2**-44, stored as float32 (its fraction is ignored). Sums are int64, where any order gives the same
result; float sums would depend on how a device splits the row. Over up to 2**18 tokens, sums cannot
overflow.
"""

WEIGHT_ONE = 2.0**44
MAX_VOCAB_SIZE = 2**18
