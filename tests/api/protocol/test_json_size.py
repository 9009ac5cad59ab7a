"""has_more_values against the parsed document."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.api.protocol.json_size import has_more_values

TEXT = st.text(alphabet=st.sampled_from('a,[{"\\é\n'), max_size=12)
DOCUMENT = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=40,
)


def num_marks(value: Any) -> int:
    """One for each container, and for each of its elements after the first."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(len(value) - 1, 0) + sum(map(num_marks, inner))


@given(DOCUMENT, st.booleans())
def test_the_limit_is_exact_whatever_the_strings_hold(document, is_ascii):
    data = json.dumps(document, ensure_ascii=is_ascii).encode()
    expected = num_marks(document)
    assert not has_more_values(data, expected)
    assert expected == 0 or has_more_values(data, expected - 1)


@pytest.mark.parametrize("data", [b"", b'"', b'"\\', b'[,"\\"', b"\\", b'[[["', b',,,"\\\\\\"'])
def test_what_is_no_json_does_no_harm(data):
    has_more_values(data, 0)
