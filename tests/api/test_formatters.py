"""Formatters without a server: what they stream and what they answer is the same."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.completions import CompletionRequest
from servd.api.protocol.validation import parse
from servd.api.request.request_output import RequestOutput
from servd.api.serving.chat import ChatFormatter
from servd.api.serving.completion import CompletionFormatter
from servd.api.serving.formatter import ResponseInfo
from servd.api.text.tokenizer import Tokenizer
from servd.config import Config
from servd.messages.engine import FinishReason, RequestOptions
from servd.messages.outputs import CompletionOutput

INFO = ResponseInfo("id", "m", Config(), Tokenizer.bytes(), RequestOptions())

CHAT_BODY = {"messages": [{"role": "user", "content": "a"}], "n": 2}
TEXT_BODY = {"prompt": ["a", "b"], "n": 2}

# The pieces of each choice's text, and the order in which choices get one.
PIECES = st.lists(st.text("ab é", max_size=4), min_size=1, max_size=5)
ORDERS = st.randoms(use_true_random=False)


def outputs_of(texts: list[list[str]], n: int, order: Any) -> list[RequestOutput]:
    """Return the outputs of choices with these pieces, each finished by its last one."""
    places = [choice for choice, pieces in enumerate(texts) for _ in pieces]
    order.shuffle(places)
    remaining = [list(pieces) for pieces in texts]
    outputs: list[RequestOutput] = []
    for choice in places:
        text = remaining[choice].pop(0)
        is_last = not remaining[choice]
        delta = CompletionOutput(
            index=choice % n,
            text=text,
            token_ids=list(text.encode()),
            finish_reason=FinishReason.STOP if is_last else None,
        )
        outputs.append(prompt_output(choice // n, [delta]))
    return outputs


def prompt_output(index: int, deltas: list[CompletionOutput]) -> RequestOutput:
    name = f"r-{index}"
    return RequestOutput(
        request_id=name, prompt="p", prompt_token_ids=[1], outputs=deltas, index=index
    )


def chunks_of(frames: bytes) -> list[dict[str, Any]]:
    lines = frames.decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@given(st.lists(PIECES, min_size=2, max_size=2), ORDERS)
def test_a_chat_streams_what_it_answers(texts, order):
    streams = []
    for stream in (True, False):
        body = parse(ChatCompletionRequest, json.dumps(CHAT_BODY | {"stream": stream}).encode())
        formatter = ChatFormatter(INFO, body, body.sampling_params({}))
        formatter.begin([prompt_output(0, [])])
        streams.append(formatter)
    chunks: list[dict[str, Any]] = []
    for output in outputs_of(texts, 2, order):
        deltas = [CompletionOutput(**fields_of(delta)) for delta in output.outputs]
        chunks += chunks_of(streams[0].frames(prompt_output(0, deltas)))
        streams[1].add_output(output)
    answer = json.loads(streams[1].encode_response())
    for choice in answer["choices"]:
        own_chunks = [chunk["choices"][0] for chunk in chunks]
        own_chunks = [chunk for chunk in own_chunks if chunk["index"] == choice["index"]]
        text = "".join(chunk["delta"].get("content") or "" for chunk in own_chunks)
        assert text == choice["message"]["content"] == "".join(texts[choice["index"]])
        assert own_chunks[0]["delta"]["role"] == "assistant"
        assert [chunk["finish_reason"] for chunk in own_chunks][-1] == "stop"
    assert answer["usage"]["completion_tokens"] == len("".join(map("".join, texts)).encode())


@given(st.lists(PIECES, min_size=4, max_size=4), ORDERS)
def test_a_completion_streams_what_it_answers(texts, order):
    formatters = []
    for stream in (True, False):
        body = parse(CompletionRequest, json.dumps(TEXT_BODY | {"stream": stream}).encode())
        formatter = CompletionFormatter(INFO, body, body.sampling_params({}), 2)
        formatter.begin([prompt_output(0, []), prompt_output(1, [])])
        formatters.append(formatter)
    streamed = [""] * 4
    for output in outputs_of(texts, 2, order):
        deltas = [CompletionOutput(**fields_of(delta)) for delta in output.outputs]
        for chunk in chunks_of(formatters[0].frames(prompt_output(output.index, deltas))):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        formatters[1].add_output(output)
    answer = json.loads(formatters[1].encode_response())
    assert streamed == [choice["text"] for choice in answer["choices"]]
    assert streamed == ["".join(pieces) for pieces in texts]


def fields_of(delta: CompletionOutput) -> dict[str, Any]:
    return {name: getattr(delta, name) for name in delta.__struct_fields__}
