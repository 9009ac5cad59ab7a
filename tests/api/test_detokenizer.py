"""Detokenizer and OutputProcessor: pieces of text, stop strings, the end of requests."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import Processor
from servd.api.request.request_state import ProcessedInputs, find_choice
from servd.api.request.timeline import Timeline
from servd.api.text.detokenizer import Detokenizer
from servd.api.text.prompt import Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.messages.engine import EngineCoreOutput, FinishReason, TokenLogprobs
from servd.messages.params import SamplingParams

BYTES = Tokenizer.bytes()
TEXT = st.one_of(
    st.text("ab", max_size=25), st.text(st.characters(exclude_categories=["Cs"]), max_size=25)
)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character until a stop string ends here; of several the longest."""
    for end in range(len(text) + 1):
        ending_stops = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_stops:
            stop = max(ending_stops, key=len)
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


@given(
    text=st.text("ab", max_size=20),
    stop=st.text("ab", min_size=1, max_size=3),
    min_tokens=st.integers(0, 20),
    size=st.integers(1, 7),
)
def test_stop_strings_count_after_min_tokens(text: str, stop: str, min_tokens: int, size: int):
    params = SamplingParams(stop=[stop], min_tokens=min_tokens, max_tokens=None)
    detokenizer = Detokenizer(BYTES, params)
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
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<s>"])
    backend.normalizer = normalizers.Replace(" ", "▁")
    tokenizer = Tokenizer(backend, {}, "")
    for prompt, output in (([0], [2, 2]), ([0, 3], [2, 2])):
        detokenizer = Detokenizer(tokenizer, SamplingParams(), prompt)
        streamed = "".join([detokenizer.push([i]) for i in output])
        assert backend.decode(prompt + output) == backend.decode(prompt) + streamed


# ---- OutputProcessor ----

TOKENIZER = Tokenizer.bytes()
PROCESSOR = Processor(Config(), FAKE_SPEC, TOKENIZER, 1000)
EOS = 256


def prepare(request_id: str = "r", **params) -> ProcessedInputs:
    sampling = SamplingParams(temperature=0, **params)
    return PROCESSOR.process_inputs(request_id, Prompt(content="prompt"), sampling)


class Running:
    """Requests, as AsyncLLM has them, and their OutputProcessor."""

    def __init__(self, *requests: ProcessedInputs) -> None:
        self.processor = OutputProcessor(TOKENIZER)
        states = [self.processor.add_request(inputs, Timeline("t")) for inputs in requests]
        self.requests = {state.request_id: state for state in states}

    def process(self, outputs: list[EngineCoreOutput]):
        """Yield the state, the delta and the ids to abort of each choice, as EngineClient does."""
        by_choice: dict[str, list[EngineCoreOutput]] = {}
        for output in outputs:
            by_choice.setdefault(output.request_id, []).append(output)
        for engine_id, steps in by_choice.items():
            running = find_choice(self.requests, engine_id)
            if running is None:
                continue
            state, choice = running
            delta = self.processor.process_outputs(steps, state, choice)
            is_stopped = delta.finish_reason is not None and steps[-1].finish_reason is None
            yield state, delta, [engine_id] if is_stopped else []


def out(
    text: str | list[int], finish: FinishReason | None = None, request_id: str = "r", **fields
) -> EngineCoreOutput:
    ids = list(text.encode()) if isinstance(text, str) else text
    return EngineCoreOutput(request_id, ids, finish, **fields)


def deltas_of(running: Running, output: EngineCoreOutput):
    [(state, delta, stopped)] = running.process([output])
    assert state.request_id == "r"
    return delta, stopped


def test_the_end_token_is_counted_but_is_not_text():
    running = Running(prepare(stop_token_ids=[ord(".")]))
    deltas_of(running, out("a"))
    delta, _ = deltas_of(running, out("b.", FinishReason.STOP, stop_reason=ord(".")))
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("b", [98, 46], 46)


def test_merged_steps_give_one_equal_delta():
    entries = [TokenLogprobs([i], [-1.0 * i], 1) for i in range(4)]
    steps = [
        out("a", num_cached_tokens=3, logprobs=entries[:1]),
        out([0xC3], logprobs=entries[1:2], num_drafts=3, num_accepted=2),
        out([0xA9, 98], FinishReason.LENGTH, logprobs=entries[2:]),
    ]
    [(_, whole, _)] = Running(prepare(logprobs=0)).process([*steps])
    running = Running(prepare(logprobs=0))
    joined, *single_deltas = [deltas_of(running, step)[0] for step in steps]
    for other in single_deltas:
        joined.add(other)
    assert whole == joined
    assert (whole.text, whole.token_ids, whole.drafts) == ("aéb", [97, 0xC3, 0xA9, 98], [(3, 2)])


def test_a_stop_string_ends_the_request_and_aborts_it_in_the_engine():
    running = Running(prepare(stop=["END"], logprobs=1))
    logprobs = [TokenLogprobs([0], [0.0], 1) for _ in range(5)]
    assert deltas_of(running, out("aE", logprobs=logprobs[:2]))[0].text == "a"
    delta, stopped = deltas_of(running, out("NDxyz", logprobs=logprobs))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", FinishReason.STOP, "END")
    assert delta.token_ids == list(b"ND")
    assert delta.positions is not None and len(delta.positions) == 2
    assert stopped == ["r"]
    assert not [*running.process([out("late")])]
    assert running.requests["r"].open_engine_ids() == []


def test_a_stop_string_in_the_last_output_needs_no_abort():
    running = Running(prepare(stop=["b"]))
    delta, stopped = deltas_of(running, out("abc", FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason) == ("a", FinishReason.STOP)
    assert (delta.stop_reason, stopped) == ("b", [])


def test_choices_are_separate():
    running = Running(prepare(n=3, stop=["!"]))
    outputs = [out("a", None, "r_0"), out("b!", None, "r_1"), out("c", FinishReason.LENGTH, "r_2")]
    deltas = [*running.process(outputs)]
    assert [(s.request_id, d.index, d.text, d.finish_reason) for s, d, _ in deltas] == [
        ("r", 0, "a", None),
        ("r", 1, "b", FinishReason.STOP),
        ("r", 2, "c", FinishReason.LENGTH),
    ]
    assert [stopped for *_, stopped in deltas] == [[], ["r_1"], []]
    state = running.requests["r"]
    assert find_choice(running.requests, "r_0") == (state, state.choices[0])
    assert find_choice(running.requests, "r_1") is None
    assert running.requests.pop("r").open_engine_ids() == ["r_0"]
    assert not [*running.process([out("a", None, "r_0")])]


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.ERROR])
def test_other_ends(finish: FinishReason):
    running = Running(prepare())
    delta, stopped = deltas_of(running, out([], finish, error="why"))
    assert (delta.text, delta.finish_reason, delta.error, stopped) == ("", finish, "why", [])
    assert running.requests["r"].open_engine_ids() == []
