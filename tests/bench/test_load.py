"""`servd bench`: what it sends and reports, against servers whose timing is known."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from aiohttp import web  # noqa: E402

from servd.base.errors import ServdError  # noqa: E402
from servd.bench import _data, _load, _report, serve  # noqa: E402
from servd.terminal import api_client  # noqa: E402

FIRST, GAP, TOKENS = 0.06, 0.02, 5  # seconds, seconds, tokens


@pytest.fixture
async def slow_server() -> AsyncIterator[str]:
    """Answers every completion with TOKENS chunks, the first after FIRST s, others after GAP s."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("prompt") == "fail":
            return web.json_response({"error": {"message": "no"}}, status=400)
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        part: dict[str, object] = {"text": "x"}
        if body.get("messages") == [{"role": "user", "content": "hello"}]:
            assert body["max_completion_tokens"] == TOKENS
            part = {"delta": {"role": "assistant", "content": ""}}
            await reply.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
            part = {"delta": {"content": "x"}}
        for i in range(TOKENS):
            await asyncio.sleep(GAP if i else FIRST)
            await reply.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS}
        await reply.write(
            f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        )
        return reply

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("chats", [False, True])
async def test_times_are_those_of_the_server(slow_server: str, chats: bool):
    load = _load.LoadGenerator(slow_server, "m", concurrency=2, chats=chats)
    records, seconds = await _load.run(
        load, [_data.BenchPrompt("hello", TOKENS)] * 4, show_progress=False
    )
    total = FIRST + (TOKENS - 1) * GAP
    assert 2 * total <= seconds  # four requests, two at a time
    for record in records:
        assert len(record.itl) == TOKENS - 1
        assert record.tpot == pytest.approx(sum(record.itl) / len(record.itl))
        assert record.ttft + sum(record.itl) <= record.ended - record.started <= seconds
        assert FIRST <= record.ttft and GAP / 2 <= record.tpot  # what is read late counts for ttft
    summary = _report.summarise(records, seconds)
    assert (summary["requests"], summary["output_tokens"], summary["prompt_tokens"]) == (
        4,
        4 * TOKENS,
        28,
    )
    assert summary["output_tokens_per_s"] == pytest.approx(4 * TOKENS / seconds)
    assert FIRST * 1000 <= summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"]


async def test_failures_are_counted_apart(slow_server: str):
    prompts = [_data.BenchPrompt("hello", 1), _data.BenchPrompt("fail", 1)]
    records, seconds = await _load.run(
        _load.LoadGenerator(slow_server, "m"), prompts, show_progress=False
    )
    summary = _report.summarise(records, seconds)
    assert (summary["requests"], summary["failed"]) == (1, 1)
    assert "HTTP 400" in summary["first_error"]
    with pytest.raises(ServdError, match="all 1 requests failed"):
        _report.summarise(records[1:], seconds)


async def test_a_server_that_refuses_to_list_its_models_counts_as_running(slow_server: str):
    with pytest.raises(ServdError, match="/v1/models: 404"):
        await asyncio.to_thread(api_client.Client(slow_server).first_model)


async def test_request_rate_spreads_arrivals(slow_server: str):
    load = _load.LoadGenerator(slow_server, "m", request_rate=50)
    records, _ = await _load.run(load, [_data.BenchPrompt("hello", 1)] * 20, show_progress=False)
    starts = sorted(record.started for record in records)
    assert 0.1 < starts[-1] - starts[0]  # 19 gaps of 20 ms on average


def arguments(**options):
    parser = argparse.ArgumentParser()
    _data.add_options(parser, 10, 20, 30)
    return parser.parse_args(
        [part for name, value in options.items() for part in (f"--{name}", str(value))]
    )


def test_workloads(tmp_path: Path):
    prompts = _data.make_prompts(arguments(**{"prefix-len": 5, "range-ratio": 0.5}), more=2)
    assert len(prompts) == 12
    assert len({tuple(p.prompt[:5]) for p in prompts}) == 1
    assert all(15 <= len(p.prompt) <= 35 and 15 <= p.output_len <= 45 for p in prompts)
    assert prompts == _data.make_prompts(arguments(**{"prefix-len": 5, "range-ratio": 0.5}), more=2)

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "output_len": 3}\n')
    assert _data.make_prompts(arguments(jsonl=file)) == [
        _data.BenchPrompt("a", 30),
        _data.BenchPrompt([1, 2], 3),
    ]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ServdError, match="prompt"):
        _data.make_prompts(arguments(jsonl=file))


def test_conversations_of_sharegpt(tmp_path: Path):
    turns = [[f"question {i} " * 4, f"answer {i} " * (i + 1)] for i in range(20)]
    turns += [["?", "too short a question"], ["no answer " * 4], ["long " * 9999, "answer " * 9]]
    entries = [{"conversations": [{"value": text} for text in pair]} for pair in turns]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(entries))
    options = {"dataset-name": "sharegpt", "dataset-path": file, "num-prompts": 12}
    prompts = _data.make_prompts(arguments(**options), more=3, count=len)
    assert len({prompt.prompt for prompt in prompts}) == 15
    whole = dict(pair for pair in turns if len(pair) == 2)
    assert all(len(whole[prompt.prompt]) == prompt.output_len for prompt in prompts)
    same = _data.make_prompts(arguments(**options, **{"sharegpt-output-len": 3}), count=len)
    assert {prompt.output_len for prompt in same} == {3}
    with pytest.raises(ServdError, match="20 prompts of 30"):
        _data.make_prompts(arguments(**options), more=18, count=len)
    for entries in ({"conversations": 3}, [{"conversations": [{"value": 5}, {"value": "a"}]}]):
        file.write_text(json.dumps(entries))
        with pytest.raises(ServdError, match="--dataset-path"):
            _data.make_prompts(arguments(**options))
    with pytest.raises(ServdError, match="needs --dataset-path"):
        _data.make_prompts(arguments(**{"dataset-name": "sharegpt"}))


def serve_arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    return parser.parse_args([*flags])


def test_every_run_of_serve_sends_the_same_prompts():
    assert [serve_arguments(*flags).data_seed for flags in ([], ["--seed", "7"])] == [0, 7]
    assert serve_arguments("--data-seed", "8").data_seed == 8


def test_a_host_may_be_an_address_of_ipv6():
    with pytest.raises(ServdError, match=r"at http://\[::1\]:1; "):
        serve.run(serve_arguments("--host", "::1", "--port", "1"))


def test_an_unwritable_result_folder_is_refused_first(tmp_path: Path):
    (tmp_path / "file").touch()
    flags = ["--save-result", "--result-dir", str(tmp_path / "file" / "folder"), "--model", "m"]
    with pytest.raises(ServdError, match="--result-dir .*: Not a directory"):
        serve.run(serve_arguments(*flags, "--url", "http://127.0.0.1:1"))
