"""`servd bench` from the command line, and the benchmarks that use it."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from servd.base import plugins

ROOT = Path(__file__).parents[2]
SCRIPTS = ("engine_step", "startup")  # of benchmarks/


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
            "--a",
            f"{serve} {a}",
            "--a-url",
            f"http://127.0.0.1:{a}",
            "--b",
            f"{serve} {b}",
            "--b-url",
            f"http://127.0.0.1:{b}",
            "--concurrency",
            "2",
            "--num-prompts",
            "4",
        ],
        "engine_step": engine,
        "latency": [*engine, "--repeats", "2"],
        "serve": [  # as vLLM's users write it
            "--backend",
            "vllm",
            "--endpoint",
            "/v1/completions",
            "--dataset-name",
            "random",
            "--num-prompts",
            "6",
            "--random-output-len",
            "5",
            "--max-concurrency",
            "3",
            "--random-range-ratio",
            "0",
            "--seed",
            "7",
            "--save-result",
            "--result-filename",
            "result.json",
            "--percentile-metrics",
            "ttft,tpot",
            "--disable-tqdm",
        ],
        "spec": [*engine, "--methods", "ngram", "--depths", "3", "--batches", "1", "2"],
        "startup": ["--serve", "--executor fake", "--repeats", "1", "--port", str(free_port())],
        "throughput": engine,
    }


@pytest.mark.parametrize("name", [*plugins.names("servd.bench"), *SCRIPTS])
def test_command(name: str, tmp_path: Path, request: pytest.FixtureRequest):
    options = commands()[name]
    if name == "serve":
        url = urlsplit(request.getfixturevalue("fake_server").url)
        options += ["--host", url.hostname, "--port", str(url.port)]
        options += ["--result-dir", str(tmp_path / "new")]
    file = tmp_path / "figures.json"
    program = [f"benchmarks.{name}"] if name in SCRIPTS else ["servd", "bench", name]
    command = [sys.executable, "-m", *program, *options]
    result = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
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
