"""`servd bench`: what it reports, against servers whose timing is known, and every command from the
command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="servd[bench] is not installed")
from aiohttp import web  # noqa: E402

from benchmarks import cpu  # noqa: E402
from servd import plugins  # noqa: E402
from servd.cli import _client  # noqa: E402
from servd.cli.bench import _data, _load, _report, serve  # noqa: E402
from servd.errors import ServdError  # noqa: E402
from tests.parity.families import CASES, make_checkpoint  # noqa: E402

ROOT = Path(__file__).parents[2]
FIRST, GAP, TOKENS = 0.06, 0.02, 5  # seconds, seconds, tokens


@pytest.fixture
async def slow_server() -> AsyncIterator[str]:
    """Answers every completion with TOKENS chunks, the first after FIRST seconds, the others GAP
    apart.
    """

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
    load = _load.Load(slow_server, "m", concurrency=2, chats=chats)
    records, seconds = await _load.run(
        load, [_data.Prompt("hello", TOKENS)] * 4, show_progress=False
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
    prompts = [_data.Prompt("hello", 1), _data.Prompt("fail", 1)]
    records, seconds = await _load.run(_load.Load(slow_server, "m"), prompts, show_progress=False)
    summary = _report.summarise(records, seconds)
    assert (summary["requests"], summary["failed"]) == (1, 1)
    assert "HTTP 400" in summary["first_error"]
    with pytest.raises(ServdError, match="all 1 requests failed"):
        _report.summarise(records[1:], seconds)


async def test_a_server_that_refuses_to_list_its_models_counts_as_running(slow_server: str):
    with pytest.raises(ServdError, match="/v1/models: 404"):
        await asyncio.to_thread(_client.Client(slow_server).first_model)


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    with pytest.raises(ServdError, match="matplotlib"):
        serve.run(parser.parse_args(["--plot", "x.svg", "--url", "http://127.0.0.1:1"]))


async def test_request_rate_spreads_arrivals(slow_server: str):
    load = _load.Load(slow_server, "m", request_rate=50)
    records, _ = await _load.run(load, [_data.Prompt("hello", 1)] * 20, show_progress=False)
    starts = sorted(record.started for record in records)
    assert 0.1 < starts[-1] - starts[0]  # 19 gaps of 20 ms on average


def arguments(**options):
    import argparse

    parser = argparse.ArgumentParser()
    _data.add_options(parser, 10, 20, 30)
    return parser.parse_args(
        [part for name, value in options.items() for part in (f"--{name}", str(value))]
    )


def test_workloads(tmp_path: Path):
    prompts = _data.make_prompts(arguments(**{"prefix-len": 5, "range-ratio": 0.5}), more=2)
    assert len(prompts) == 12
    assert len({tuple(p.content[:5]) for p in prompts}) == 1
    assert all(15 <= len(p.content) <= 35 and 15 <= p.output_len <= 45 for p in prompts)
    assert prompts == _data.make_prompts(arguments(**{"prefix-len": 5, "range-ratio": 0.5}), more=2)

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "output_len": 3}\n')
    assert _data.make_prompts(arguments(jsonl=file)) == [
        _data.Prompt("a", 30),
        _data.Prompt([1, 2], 3),
    ]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ServdError, match="must be an object with a prompt"):
        _data.make_prompts(arguments(jsonl=file))


def test_conversations_of_sharegpt(tmp_path: Path):
    turns = [[f"question {i} " * 4, f"answer {i} " * (i + 1)] for i in range(20)]
    turns += [["?", "too short a question"], ["no answer " * 4], ["long " * 9999, "answer " * 9]]
    entries = [{"conversations": [{"value": text} for text in pair]} for pair in turns]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(entries))
    options = {"dataset-name": "sharegpt", "dataset-path": file, "num-prompts": 12}
    prompts = _data.make_prompts(arguments(**options), more=3, num_tokens=len)
    assert len({prompt.content for prompt in prompts}) == 15
    whole = dict(pair for pair in turns if len(pair) == 2)
    assert all(len(whole[prompt.content]) == prompt.output_len for prompt in prompts)
    same = _data.make_prompts(arguments(**options, **{"sharegpt-output-len": 3}), num_tokens=len)
    assert {prompt.output_len for prompt in same} == {3}
    with pytest.raises(ServdError, match="20 prompts of 30"):
        _data.make_prompts(arguments(**options), more=18, num_tokens=len)
    for entries in ({"conversations": 3}, [{"conversations": [{"value": 5}, {"value": "a"}]}]):
        file.write_text(json.dumps(entries))
        with pytest.raises(ServdError, match="JSON list"):
            _data.make_prompts(arguments(**options))
    with pytest.raises(ServdError, match="needs --dataset-path"):
        _data.make_prompts(arguments(**{"dataset-name": "sharegpt"}))


def serve_arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    return parser.parse_args([*flags])


def test_random_prompts_of_chats_are_text(fake_server, tmp_path: Path):
    flags = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--num-prompts", "3"]
    flags += ["--input-len", "50", "--output-len", "4", "--json", str(tmp_path / "figures.json")]
    command = [sys.executable, "-m", "servd", "bench", "serve", *flags, "--url", fake_server.url]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["output_tokens"], figures["failed"]) == (12, 0)
    assert figures["prompt_tokens"] > 3 * 50


def test_every_run_of_serve_sends_the_same_prompts():
    assert [serve_arguments(*flags).data_seed for flags in ([], ["--seed", "7"])] == [0, 7]
    assert serve_arguments("--data-seed", "8").data_seed == 8


def test_a_host_may_be_an_address_of_ipv6():
    with pytest.raises(ServdError, match=r"http://\[::1\]:1 "):
        serve.run(serve_arguments("--host", "::1", "--port", "1"))


def test_a_folder_of_results_that_cannot_be_made_is_named_before_the_measurement(tmp_path: Path):
    (tmp_path / "file").touch()
    flags = ["--save-result", "--result-dir", str(tmp_path / "file" / "folder"), "--model", "m"]
    with pytest.raises(ServdError, match="--result-dir .*: Not a directory"):
        serve.run(serve_arguments(*flags, "--url", "http://127.0.0.1:1"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def commands() -> dict[str, list[str]]:
    """A short run of every command, on the fake model."""
    a, b = free_port(), free_port()
    serve = f"{sys.executable} -m servd serve --executor fake --port"
    engine = ["--executor", "fake", "--num-prompts", "3", "--output-len", "5"]
    return {
        "compare": [
            "--a", f"{serve} {a}", "--a-url", f"http://127.0.0.1:{a}",
            "--b", f"{serve} {b}", "--b-url", f"http://127.0.0.1:{b}",
            "--concurrency", "2", "--num-prompts", "4",
        ],
        "engine_step": engine,
        "latency": [*engine, "--repeats", "2"],
        "serve": [  # as vLLM's users write it
            "--backend", "vllm", "--endpoint", "/v1/completions", "--dataset-name", "random",
            "--num-prompts", "6", "--random-output-len", "5", "--max-concurrency", "3",
            "--random-range-ratio", "0", "--seed", "7", "--save-result", "--result-filename",
            "result.json", "--percentile-metrics", "ttft,tpot", "--disable-tqdm",
        ],
        "spec": [*engine, "--methods", "ngram", "--depths", "3", "--batches", "1", "2"],
        "startup": ["--serve", "--executor fake", "--repeats", "1", "--port", str(free_port())],
        "throughput": engine,
    }  # fmt: skip


@pytest.mark.parametrize("name", plugins.names("servd.cli.bench"))
def test_command(name: str, tmp_path: Path, request: pytest.FixtureRequest):
    options = commands()[name]
    if name == "serve":
        url = urlsplit(request.getfixturevalue("fake_server").url)
        options += ["--host", url.hostname, "--port", str(url.port)]
        options += ["--result-dir", str(tmp_path / "new")]
    file = tmp_path / "figures.json"
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "servd",
            "bench",
            name.replace("_", "-"),
            *options,
            "--json",
            str(file),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    match name:
        case "serve":
            assert figures["output_tokens"] == 30
            saved = json.loads((tmp_path / "new" / "result.json").read_text())
            assert (saved["completed"], saved["total_output_tokens"]) == (6, 30)
            assert saved["mean_ttft_ms"] == figures["ttft_ms"]["mean"]
            assert saved["median_e2el_ms"] == figures["request_ms"]["p50"]
            assert (saved["num_prompts"], saved["max_concurrency"]) == (6, 3)
        case "throughput":
            assert figures["requests"] == 3
        case "spec":
            rows = {(row["method"], row["batch"]): row for row in figures["rows"]}
            assert len(rows) == 4
            assert rows["none", 1]["acceptance_length"] == rows["none", 2]["ratio"] == 1
            assert 1 < rows["ngram", 1]["acceptance_length"] <= 4
        case "engine_step":
            phases = figures["us_per_step"]
            total = phases.pop("all")
            assert sum(phases.values()) - phases["ipc"] == pytest.approx(total)
        case "startup":
            assert 0 < figures["ready_ms"]["mean"] < figures["first_token_ms"]["mean"]
        case "latency":
            assert figures["batch_ms"]["mean"] == pytest.approx(
                5 * figures["ms_per_output_step"]["mean"]
            )
        case "compare":
            assert figures["a"]["2"]["output_tokens"] == figures["b"]["2"]["output_tokens"]


def test_report_measures_the_parts_that_are_asked_for(tmp_path: Path):
    folder, out = (
        make_checkpoint(tmp_path / "model", "gpt2", CASES["gpt2"]["tied"]),
        tmp_path / "page.md",
    )
    command = [sys.executable, "-m", "benchmarks.cpu", "--out", str(out), "--parts", "weights"]
    result = subprocess.run(
        [*command, "ceilings", "--", str(folder)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "GB/s" in out.read_text()
    assert "## The server" not in out.read_text()
    result = subprocess.run([*command, "--", "no-such-folder"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "Not measured: weights: no-such-folder is not a folder" in out.read_text()
    result = subprocess.run(
        [*command, "--peer", "serve", "--", str(folder)], capture_output=True, text=True
    )
    assert result.returncode == 2 and "--peer and --peer-url go together" in result.stderr


def test_the_page_in_docs_has_only_what_was_measured():
    """`make bench-cpu` overwrites the page; what people write is in benchmarks-peers.md."""
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf8")
    written = (ROOT / "benchmarks/cpu.py").read_text(encoding="utf8")
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert [line for line in headings if f'"{line}"' not in written] == []
    assert page.splitlines()[2] in cpu.page({})


def test_report_compares_with_what_the_machine_allows():
    """10 GB/s read 20 M float32 in 8 ms; 8 prompts of 512 tokens over 10 M elements are 81.92
    GFLOP.
    """
    facts = {
        "threads": 2,
        "bandwidth": 10e9,
        "matrix_rate": 200e9,
        "elements": 20_000_000,
        "layer_elements": 10_000_000,
    }
    times = {
        "float32_1": 16.0,
        "float32_8": 20.0,
        "float32_32": 40.0,
        "float32_long": 90.0,
        "float32_prompts": 819.2,
    }
    summary = {"output_tokens_per_s": 30.0, "ttft_ms": {"mean": 50.0}}
    other = {"output_tokens_per_s": 20.0, "ttft_ms": {"mean": 200.0}}
    compared = {"a": {"8": summary}, "b": {"8": other}}
    text = cpu.page(
        facts | times | {"peer_name": "x", "compared": compared, "failed": ["server: no port"]}
    )
    assert "| float32 | 16.0 | 50 % | 20.0 | 40.0 | 90 | 100 (50 %) |" in text
    assert "| 8 | 30 | 20 | 1.50 | 50 | 200 | 0.25 |" in text
    assert "Not measured: server: no port" in text
