"""tools/trace.py: the calls of one request, under the names that the code has."""

import asyncio
import re
from argparse import Namespace
from html.parser import HTMLParser
from itertools import chain

import msgspec
import pytest

from servd.messages.engine import EngineCoreRequest
from servd.terminal.api_client import Client
from tests.api.harness import chat_prompt, output_text, serve
from tools import trace
from tools.trace import Call

PROMPT = "Say <b>hi</b>"
NUM_TOKENS = 3


def walk(call: Call) -> list[Call]:
    return [call, *chain.from_iterable(map(walk, call.calls))]


def calls_of(calls: list[Call], name: str) -> list[Call]:
    return [call for top in calls for call in walk(top) if call.name == name]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--executor", "fake"], []),
        pytest.param(
            ["demo", "--device", "cpu"],
            ["CPUModelRunner.execute_model", "Qwen3ForCausalLM"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_way_of_a_request(capsys, options, expected):
    """On a server of its own: what happens first comes first."""
    assert trace.main([PROMPT, *options, "--max-tokens", str(NUM_TOKENS)]) == 0
    tree, _, tokens = capsys.readouterr().out.partition("came after")
    names = re.findall(r"^[│ ]*[├└]─ (?:CPU(?=Model))?(\S+)", tree, re.MULTILINE)
    way = [
        "AsyncLLM.prepare",
        "Processor.process",
        "ChatTemplate.render",
        "Tokenizer.encode",
        "AsyncLLM.generate",
        "AsyncMPClient.send",
        "EngineCoreProc.process_input_sockets",
        "EngineCoreProc.run_busy_loop",
        "EngineCore.step",
        "Scheduler.schedule",
        "ModelRunner.execute_model",
        "ModelRunner.forward",
        "ModelRunner.sample_tokens",
        "Outbox.send",
        "AsyncMPClient.drain",
        "OutputProcessor.process",
    ]
    places = [names.index(name) for name in way]
    assert places == sorted(places)
    assert all(word in tree for word in expected)
    sampled = [int(i) for i in re.findall(r"sampled \[(\d+)\]", tree)]
    ids = [int(i) for i in re.findall(r"ms +(\d+) \'", tokens)]
    assert sampled == ids[: len(sampled)] and len(sampled) == 2 and len(ids) == NUM_TOKENS


@pytest.mark.parametrize("raw", [False, True])
async def test_a_running_server_is_asked(raw):
    sizes: list[int] = []
    async with serve(listen=True, block_size=4) as served:
        tell = served.engine.tell

        def weigh(message):
            sizes.append(len(msgspec.msgpack.encode(message)))
            tell(message)

        served.engine.tell = weigh
        client = Client(served.url)
        calls, tokens = await asyncio.to_thread(trace.ask, client, PROMPT, raw, NUM_TOKENS)
        [sent] = [
            message for message in served.engine.sent if isinstance(message, EngineCoreRequest)
        ]
        [request] = served.async_llm.tracer.recent.values()
    prompt = PROMPT if raw else chat_prompt(PROMPT)
    assert "".join(token.candidates[0][0] for token in tokens) == output_text(prompt, NUM_TOKENS)
    assert [len(token.candidates) for token in tokens] == [5] * NUM_TOKENS
    times = [token.seconds for token in tokens]
    assert times == sorted(times)
    token_ids = sent.prompt_token_ids
    assert [call.text for call in calls_of(calls, "Tokenizer.encode")] == [
        f"{len(token_ids)} prompt tokens {trace.shorten(token_ids)}"
    ]
    was = msgspec.structs.replace(sent, block_hashes=[], marks=[])  # the engine fills them in
    size = len(msgspec.msgpack.encode(was))
    assert calls_of(calls, "AsyncMPClient.send")[0].text == f"EngineCoreRequest, {size} bytes"
    texts = [call.text for call in calls_of(calls, "Outbox.send")]
    assert texts == [f"EngineCoreOutputs, {size} bytes" for size in sizes] and len(texts) == 3
    [first, *_] = calls_of(calls, "EngineCore.step")
    blocks = request.choices[0].block_ids
    assert len(blocks) == -(-(len(token_ids) + NUM_TOKENS - 1) // 4)
    assert first.text.endswith(f"its blocks in the end: {trace.shorten(blocks)}")
    assert first.text.startswith(f"step 0: {len(token_ids)} tokens of 1 requests")
    sampled = [call.text for call in calls_of(calls, "ModelRunner.sample_tokens")]
    assert sampled == [f"sampled [{token.id}]" for token in tokens]
    for call in chain.from_iterable(map(walk, calls)):
        assert sum(part.seconds for part in call.calls) <= call.seconds * 1.01 + 1e-4 or (
            call.seconds == 0
        )


async def test_a_page_of_it(tmp_path, capsys):
    file = tmp_path / "trace.html"
    async with serve(listen=True) as served:
        arguments = Namespace(
            html=str(file), url=served.url, prompt=PROMPT, raw=False, max_tokens=NUM_TOKENS
        )
        assert await asyncio.to_thread(trace.run, arguments) == 0
    text = file.read_text()
    names: list[str] = []

    class Page(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "link", "img") and not {"src", "href"} & dict(attrs).keys()

        def handle_data(self, data):
            names.append(data)

    Page().feed(text)
    page = "".join(names)
    parts = [page.index(part) for part in (PROMPT, "─ Scheduler.schedule", "candidates")]
    assert parts == sorted(parts) and "url(" not in text
