"""Detokenizer: streamed pieces against the naive answer on the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from servd.api.text.detokenizer import Detokenizer
from servd.api.text.tokenizer import Tokenizer
from servd.messages.params import SamplingParams

BYTES = Tokenizer.bytes()
TEXT = st.one_of(
    st.text("ab", max_size=25), st.text(st.characters(exclude_categories=["Cs"]), max_size=25)
)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character until a stop string ends here; of several the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@st.composite
def generations(draw):
    """A text, stop strings of which some occur in it, and a way to cut its tokens into chunks."""
    text = draw(TEXT)
    stops = draw(st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
    for _ in range(draw(st.integers(0, 2)) if text else 0):
        begin = draw(st.integers(0, len(text) - 1))
        stops.append(text[begin : draw(st.integers(begin + 1, len(text)))])
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    return text, stops, sizes


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, turn = [], 0
    while ids:
        size = sizes[turn % len(sizes)]
        pieces.append(ids[:size])
        ids, turn = ids[size:], turn + 1
    return pieces


@given(generation=generations(), include=st.booleans())
@example(generation=("abcd", ["abcd", "bc"], [1]), include=False)
@example(generation=("aab", ["ab"], [3]), include=True)
def test_any_split_gives_the_whole_texts_answer(generation, include: bool):
    text, stops, sizes = generation
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=stops, include_stop_str_in_output=include))
    emitted, num_sent = "", 0
    for chunk in chunks(BYTES.encode(text), sizes):
        emitted += detokenizer.push(chunk)
        num_sent += len(chunk)
        if detokenizer.stop_reason is not None:
            break
        # Not a character more is held back than may belong to a stop string.
        so_far = text.encode()[:num_sent].decode(errors="ignore")
        possible = [n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])]
        assert emitted == so_far[: len(so_far) - max(possible, default=0)]
    emitted += detokenizer.flush()
    expected, stop = naive(text, stops, include)
    assert (emitted, detokenizer.stop_reason) == (expected, stop)
    if stop is not None:  # tokens up to the end of the stop string count, later ones do not
        whole = expected if include else expected + stop
        assert detokenizer.num_tokens == len(whole.encode())


@given(
    ids=st.lists(st.integers(0, 256), max_size=30),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
@example(ids=[0xF0, 0x9F, 0x98], sizes=[1])  # ends inside a character
@example(ids=[0xFF, 0x41, 0xC3, 0x41], sizes=[1])
def test_any_tokens_add_up_to_the_whole_decode(ids: list[int], sizes: list[int]):
    detokenizer = Detokenizer(BYTES, SamplingParams())
    pieces = [detokenizer.push(chunk) for chunk in chunks(ids, sizes)]
    assert "".join([*pieces, detokenizer.flush()]) == BYTES.decode(ids)


def test_an_emoji_over_four_tokens_comes_whole():
    detokenizer = Detokenizer(BYTES, SamplingParams())
    assert [detokenizer.push([i]) for i in "😀!".encode()] == ["", "", "", "😀", "!"]


@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=3),
       min_tokens=st.integers(0, 20),
       size=st.integers(1, 7))  # fmt: skip
def test_stop_strings_count_after_min_tokens(text: str, stop: str, min_tokens: int, size: int):
    detokenizer = Detokenizer(
        BYTES, SamplingParams(stop=[stop], min_tokens=min_tokens, max_tokens=None)
    )
    emitted = ""
    for chunk in chunks(BYTES.encode(text), [size]):
        if detokenizer.stop_reason is None:
            emitted += detokenizer.push(chunk)
    expected, reason = naive(text[min_tokens:], [stop], include=False)
    assert emitted + detokenizer.flush() == text[:min_tokens] + expected
    assert detokenizer.stop_reason == reason


@pytest.mark.parametrize(("skip", "text"), [(True, "hi"), (False, "h<eos>i")])
def test_special_tokens(skip: bool, text: str):
    detokenizer = Detokenizer(BYTES, SamplingParams(skip_special_tokens=skip))
    assert detokenizer.push([104, 256, 105]) + detokenizer.flush() == text


def test_leading_space_depends_on_the_prompt():
    # As in Llama 2: tokens carry the space before a word, and a text begins without one.
    backend = Backend(models.BPE(vocab={"<s>": 0, "▁": 1, "▁a": 2, "a": 3}, merges=[("▁", "a")]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    backend.normalizer = normalizers.Replace(" ", "▁")
    tokenizer = Tokenizer(backend, {}, "")
    for prompt, output in (([0], [2, 2]), ([0, 3], [2, 2])):
        detokenizer = Detokenizer(tokenizer, SamplingParams(), prompt)
        streamed = "".join([detokenizer.push([i]) for i in output])
        assert backend.decode(prompt + output) == backend.decode(prompt) + streamed
