"""`servd bench` from the command line, and the benchmarks that use it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp", reason="servd[bench] is not installed")

from benchmarks import cpu
from servd.base import plugins
from tests.parity.families import CASES, make_checkpoint

ROOT = Path(__file__).parents[2]


def test_random_prompts_of_chats_are_text(fake_server, tmp_path: Path):
    flags = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--num-prompts", "3"]
    flags += ["--input-len", "50", "--output-len", "4", "--json", str(tmp_path / "figures.json")]
    command = [sys.executable, "-m", "servd", "bench", "serve", *flags, "--url", fake_server.url]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["output_tokens"], figures["failed"]) == (12, 0)
    assert figures["prompt_tokens"] > 3 * 50


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


@pytest.mark.parametrize("name", plugins.names("servd.bench"))
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
