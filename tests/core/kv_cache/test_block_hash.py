"""Block hashes: equal exactly when salt and all tokens up to the end of the block are."""

from hypothesis import given
from hypothesis import strategies as st

from servd.core.kv_cache.block_hash import block_hash, root_hash

SIZE = 2
few_tokens = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=3 * SIZE, max_size=3 * SIZE)
salts = st.sampled_from([None, "", "a"])


def chain(token_ids: list[int], salt: str | None) -> list[bytes]:
    hashes = [root_hash(salt)]
    for start in range(0, len(token_ids), SIZE):
        hashes.append(block_hash(hashes[-1], token_ids[start : start + SIZE]))
    return hashes[1:]


@given(few_tokens, few_tokens, salts, salts)
def test_hashes_are_equal_exactly_as_far_as_the_beginnings_are(
    left_tokens, right_tokens, left_salt, right_salt
):
    for i, (a, b) in enumerate(
        zip(chain(left_tokens, left_salt), chain(right_tokens, right_salt), strict=True)
    ):
        end = (i + 1) * SIZE
        assert (a == b) == (left_tokens[:end] == right_tokens[:end] and left_salt == right_salt)
