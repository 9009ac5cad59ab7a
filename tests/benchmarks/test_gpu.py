"""`make bench-gpu`: every measurement runs on a CPU with tiny models; what fails is named and loses
nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import report, shapes
from benchmarks.gpu.engine import Bench, arrive
from servd.resolve import Machine
from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks-gpu.md"


@pytest.fixture(scope="module")
def facts() -> dict:
    """What the parts find that need no other server."""
    from benchmarks.gpu import parts

    found: dict = {}
    for name in ("ceilings", "attention", "gpt2", "qwen3", "llama", "compiled"):
        parts.PARTS[name]("cpu", True, lambda **facts: found.update(facts))
    return found


def test_every_part_has_a_limit_and_every_figure_a_part():
    from benchmarks.gpu import parts

    assert parts.PARTS.keys() == command.LIMITS.keys()
    assert {figure.part for figure in report.FIGURES} <= parts.PARTS.keys()


def test_all_facts_but_those_of_a_gpu_are_found(facts: dict):
    wanted = {name for name, *_ in report.DETAILS}
    assert wanted - facts.keys() == {"llama_kernel_step", "rival_rate", "rival_done"}
    # A tiny Llama: an embedding and a head of 128 x 32, and in its one layer 7,168 weights and
    # three norms.
    assert facts["llama_weight_bytes"] == 4 * (
        128 * 32 + 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 3 * 32
    )


def test_what_arrives_is_counted_from_the_first_quarter_on(facts: dict):
    assert facts["mixed_share"] > 0 and facts["mixed_rate"] > 0
    bench = Bench(
        shapes.tiny(shapes.LLAMA_8B), "cpu", max_num_seqs=4, max_model_len=64,
        max_num_batched_tokens=32, kv_cache_memory=1 << 22,
    )  # fmt: skip
    prompts, outputs, seconds = arrive(bench, 1e4, 8, 10, 5)
    steps = bench.executor.steps
    assert sum(step.num_prompt_tokens for step in steps) == 80
    assert sum(step.num_tokens - step.num_prompt_tokens for step in steps) >= 8 * 4
    assert 0 <= prompts <= 80 and 0 <= outputs and 0 < seconds < 60
    assert not bench.engine.has_work


def test_attention_backends_are_compared(facts: dict):
    measured = {
        "native": {"decode": 0.0015, "prompt": 2.0},
        "torch_sdpa": {"decode": 0.003, "prompt": 1.0},
    }
    page = report.document({f"attention_{name}": value for name, value in measured.items()}
                           | {"attention_varlen": "needs CUDA, not cpu"}, {})  # fmt: skip
    assert (
        "| | native | torch_sdpa |\n|---|---|---|\n| decode | 1.5 | 3 |\n| prompt | 2,000 | 1,000 "
        "|\n" in page
    )
    assert "- `varlen` was not measured: needs CUDA, not cpu." in page
    assert all(seconds > 0 for seconds in facts["attention_torch_sdpa"].values())
    assert len(facts["attention_torch_sdpa"]) == 6


def test_ratios_are_taken_against_the_ceilings():
    facts = {
        "bandwidth": 4e12, "matrix_rate": 8e14, "llama_one_step": 0.005, "llama_weight_bytes": 16e9,
        "llama_all_step": 0.015, "llama_kv_bytes": 34e9, "llama_prefill_operations": 1.2e14,
        "llama_prefill": 0.2, "gpt2_one_step": 0.0004, "qwen3_rate": 50_000,
        "gpt2_bytes": 8e12, "gpt2_seconds": 2.5, "qwen3_bytes": 8e12, "qwen3_seconds": 4.0,
        "rival_rate": 5000, "llama_kernel_step": 0.0144, "llama_some_step": 0.008,
        "llama_some_kv_bytes": 16e9, "mixed_share": 0.81, "gpt2_decode_64": 1e5,
        "gpt2_decode_256": 2e5, "gpt2_decode_1024": 4e5,
    }  # fmt: skip
    rows = [figure.row(facts, {})[1:] for figure in report.FIGURES]
    assert rows == [
        ("1.25x", "<= 1.15x", "NO"), ("1x", "<= 1.15x", "yes"), ("1.2x", "<= 1.15x", "NO"),
        ("75 %", ">= 65 %", "yes"), ("81 %", ">= 80 %", "yes"),
        ("0.4 ms", "<= 0.4 ms", "yes"), ("100,000 tok/s", ">= 100,000 tok/s", "yes"),
        ("200,000 tok/s", ">= 220,000 tok/s", "NO"), ("400,000 tok/s", ">= 300,000 tok/s", "yes"),
        ("80 %", ">= 75 %", "yes"), ("50 %", ">= 75 %", "NO"), ("10x", ">= 5x", "yes"),
        ("96 %", ">= 95 %", "yes"), ("1.04x", "<= 1.03x", "NO"),
    ]  # fmt: skip


def test_a_failed_part_is_named_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd
):
    scripts = {
        "ceilings": 'print(\'FACTS {"device": "a GPU", "bandwidth": 2e12}\')',
        "gpt2": "print('FACTS {\"gpt2_one_step\": 0.0003}', flush=True); raise SystemExit(3)",
        "qwen3": 'print(\'FACTS {"qwen3_bytes": 8e12, "qwen3_seconds": 5}\', flush=True)\n'
        "import os; os.system('sleep 600')",
    }
    monkeypatch.setattr(
        command, "command_of", lambda name, arguments: [sys.executable, "-c", scripts[name]]
    )
    monkeypatch.setattr(
        command, "look_at_machine", lambda: Machine(num_gpus=1, torch_has_cuda=True)
    )
    monkeypatch.setitem(command.LIMITS, "qwen3", 3)
    monkeypatch.setattr(
        sys, "argv", ["benchmarks.gpu", "--output", str(tmp_path / "page.md"), "--parts", *scripts]
    )
    assert command.main() == 0
    table = capfd.readouterr().out.split("== qwen3")[1]
    assert "gpt2: exit code 3" in table and "qwen3: took more than 3 s" in table
    assert "| 0.3 ms |" in table and "| 80 % |" in table, "found before it failed"
    assert "| GPT-2 124M decode, batch 64 | missing: exit code 3 |" in table
    page = (tmp_path / "page.md").read_text()
    assert "On a GPU, torch" in page and table.strip().endswith(page.split("\n\n")[3].strip())


def test_all_parts_together_keep_to_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd
):
    slow = [sys.executable, "-c", "import time; time.sleep(99)"]
    monkeypatch.setattr(command, "command_of", lambda name, arguments: slow)
    monkeypatch.setattr(
        command, "look_at_machine", lambda: Machine(num_gpus=1, torch_has_cuda=True)
    )
    page = ["--output", str(tmp_path / "page.md")]
    monkeypatch.setattr(
        sys, "argv", ["benchmarks.gpu", *page, "--limit", "1", "--parts", "llama", "gpt2"]
    )
    assert command.main() == 0
    lines = capfd.readouterr().out.splitlines()
    assert "llama: took more than 1 s" in lines and "gpt2: no time was left" in lines


def test_the_page_has_no_figure_that_was_not_measured():
    text = PAGE.read_text(encoding="utf8")
    assert report.COMMAND in text
    if "Not measured yet" in text:
        assert text == report.document({}, {})


@pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="there is a GPU")
@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_a_machine_without_a_gpu_is_named(target: str):
    if not shutil.which("make"):
        pytest.skip("no make")
    result = subprocess.run(
        ["make", target], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert result.returncode == 0 and "no NVIDIA GPU here" in result.stdout


def test_the_command_itself_says_so_too(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(command, "look_at_machine", Machine)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    assert command.main() == 0
    assert "no NVIDIA GPU" in capsys.readouterr().out


def test_first_facts_are_lines_of_json_though_one_fails(capfd):
    from benchmarks.gpu import first

    first.run_item("cpu", ["environment"])
    first.run_item("cpu", ["family", "llama", {"quantization": "int4"}])
    first.run_item("cpu", ["family", "nobody's", {}])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("FACT ")]
    environment, family, failed = (json.loads(line.removeprefix("FACT ")) for line in lines)
    assert environment["torch"] and family["equal"] == 1.0 and "KeyError" in failed["failed"]


# Packages of servd that a bare GPU machine lacks; docs/gpu.md lists those that it has.
LACKS = (
    "fastapi", "gguf", "httptools", "llguidance", "multipart", "openai", "prometheus_client",
    "psutil", "pydantic", "starlette", "uvicorn", "uvloop", "zmq",
)  # fmt: skip
WITHOUT = f"""
import runpy
import sys

class Lacking:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LACKS!r}:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Lacking, sys.meta_path)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_on_bare_machine(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a module, with arguments, where the packages of LACKS cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *command], cwd=ROOT, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip


def test_a_bare_gpu_machine_collects_all_tests_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    given = dict(re.findall(r"^(GPU_TESTS\w*) = (.*)$", makefile, flags=re.MULTILINE))
    paths = ["tests/worker/test_kernels_compile.py", *" ".join(given.values()).split()]
    assert "tests/worker/attention" in paths and "tests/worker/test_memory.py" in paths
    options = ("-p", "no:cacheprovider", "-m", "not slow", "--collect-only", "-q")
    done = run_on_bare_machine("pytest", *options, *paths)
    assert done.returncode == 0, done.stdout[-3000:]
    for path in paths:
        assert f"\n{path}" in "\n" + done.stdout, f"{path} has no test there"


@pytest.mark.parametrize("part", ["attention", "qwen3"])
def test_a_bare_gpu_machine_measures(part: str):
    done = run_on_bare_machine("benchmarks.gpu", "--tiny", "--part", part)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("FACTS ")
