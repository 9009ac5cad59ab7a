"""OutputProcessor: deltas, stop strings and the end of requests."""

import pytest

from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import Processor
from servd.api.request.request_state import RequestState, find_choice
from servd.api.text.prompt import Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.checkpoint.hf import FAKE_SPEC
from servd.config import Config
from servd.messages.engine import EngineCoreOutput, FinishReason, TokenLogprobs
from servd.messages.params import SamplingParams

TOKENIZER = Tokenizer.bytes()
PROCESSOR = Processor(Config(), FAKE_SPEC, TOKENIZER, 1000)
EOS = 256


def prepare(request_id: str = "r", **params) -> RequestState:
    prompt = Prompt(content="prompt", request_id=request_id)
    return PROCESSOR.process(prompt, SamplingParams(temperature=0, **params))


class Running:
    """Requests, as AsyncLLM has them, and their OutputProcessor."""

    def __init__(self, *requests: RequestState) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.processor = OutputProcessor(TOKENIZER)
        for request in requests:
            request.start(0)

    def process(self, outputs: list[EngineCoreOutput]):
        return self.processor.process(outputs, self.requests)


def out(
    text: str | list[int], finish: FinishReason | None = None, request_id: str = "r", **fields
) -> EngineCoreOutput:
    ids = list(text.encode()) if isinstance(text, str) else text
    return EngineCoreOutput(request_id, ids, finish, **fields)


def one(running: Running, output: EngineCoreOutput):
    [(state, delta, stopped)] = running.process([output])
    assert state.request_id == "r"
    return delta, stopped


def test_text_and_tokens_go_together():
    running = Running(prepare())
    delta, stopped = one(running, out("hé", num_cached_tokens=3))
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.num_cached_tokens) == (
        "hé", [104, 0xC3, 0xA9], None, 3,
    )  # fmt: skip
    assert stopped == []


def test_the_end_token_is_counted_but_is_not_text():
    running = Running(prepare(stop_token_ids=[ord(".")]))
    one(running, out("a"))
    delta, _ = one(running, out("b.", FinishReason.STOP, stop_reason=ord(".")))
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("b", [98, 46], 46)


def test_the_end_token_shows_if_asked():
    running = Running(prepare(include_stop_str_in_output=True, skip_special_tokens=False))
    delta, _ = one(running, out([98, EOS], FinishReason.STOP))
    assert delta.text == "b<eos>"


def test_what_several_steps_add_is_one_delta_and_the_same_as_one_by_one():
    entries = [TokenLogprobs([i], [-1.0 * i], 1) for i in range(4)]
    steps = [
        out("a", num_cached_tokens=3, logprobs=entries[:1]),
        out([0xC3], logprobs=entries[1:2], num_drafts=3, num_accepted=2),
        out([0xA9, 98], FinishReason.LENGTH, logprobs=entries[2:]),
    ]
    [(_, whole, _)] = Running(prepare(logprobs=0)).process([*steps])
    running = Running(prepare(logprobs=0))
    joined, *others = [one(running, step)[0] for step in steps]
    for other in others:
        joined.add(other)
    assert whole == joined
    assert (whole.text, whole.token_ids, whole.drafts) == ("aéb", [97, 0xC3, 0xA9, 98], [(3, 2)])


def test_an_incomplete_character_is_emitted_at_the_end():
    running = Running(prepare())
    delta, _ = one(running, out([0xC3]))
    assert delta.text == "" and delta.token_ids == [0xC3]
    delta, _ = one(running, out([0x41, 0xE2], FinishReason.LENGTH))
    assert delta.text == "\ufffdA\ufffd"


def test_a_stop_string_ends_the_request_and_aborts_it_in_the_engine():
    running = Running(prepare(stop=["END"], logprobs=1))
    logprobs = [TokenLogprobs([0], [0.0], 1) for _ in range(5)]
    assert one(running, out("aE", logprobs=logprobs[:2]))[0].text == "a"
    delta, stopped = one(running, out("NDxyz", logprobs=logprobs))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", FinishReason.STOP, "END")
    assert (
        delta.token_ids == list(b"ND") and delta.logprobs is not None and len(delta.logprobs) == 2
    )
    assert stopped == ["r"]
    assert not [*running.process([out("late")])]
    assert running.requests["r"].open_engine_ids() == []


def test_a_stop_string_in_the_last_output_needs_no_abort():
    running = Running(prepare(stop=["b"]))
    delta, stopped = one(running, out("abc", FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason, delta.stop_reason, stopped) == (
        "a",
        FinishReason.STOP,
        "b",
        [],
    )


def test_held_text_comes_when_the_request_ends():
    running = Running(prepare(stop=["END"]))
    assert one(running, out("xEN"))[0].text == "x"
    delta, _ = one(running, out([EOS], FinishReason.STOP))
    assert (delta.text, delta.stop_reason) == ("EN", None)


def test_choices_are_separate():
    running = Running(prepare(n=3, stop=["!"]))
    outputs = [out("a", None, "r_0"), out("b!", None, "r_1"), out("c", FinishReason.LENGTH, "r_2")]
    deltas = [*running.process(outputs)]
    assert [(s.request_id, d.index, d.text, d.finish_reason) for s, d, _ in deltas] == [
        ("r", 0, "a", None), ("r", 1, "b", FinishReason.STOP), ("r", 2, "c", FinishReason.LENGTH),
    ]  # fmt: skip
    assert [stopped for *_, stopped in deltas] == [[], ["r_1"], []]
    state = running.requests["r"]
    assert find_choice(running.requests, "r_0") == (state, state.choices[0])
    assert find_choice(running.requests, "r_1") is None
    assert running.requests.pop("r").open_engine_ids() == ["r_0"]
    assert not [*running.process([out("a", None, "r_0")])]


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.ERROR])
def test_other_ends(finish: FinishReason):
    running = Running(prepare())
    delta, stopped = one(running, out([], finish, error="why"))
    assert (delta.text, delta.finish_reason, delta.error, stopped) == ("", finish, "why", [])
    assert running.requests["r"].open_engine_ids() == []


def test_outputs_of_unknown_requests_are_dropped():
    assert not [*Running().process([out("x", None, "gone")])]
