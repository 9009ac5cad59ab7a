"""`make bench-gpu` on a CPU with tiny models: what fails is named and loses nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import report, shapes
from benchmarks.gpu.engine import Bench, arrive
from servd.config.machine import Machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def facts() -> dict:
    """What the parts find that need no other server."""
    from benchmarks.gpu import parts

    values: dict = {}
    for name in ("ceilings", "attention", "gpt2", "qwen3", "llama", "compiled"):
        parts.PARTS[name]("cpu", True, lambda **facts: values.update(facts))
    return values


def test_all_facts_but_those_of_a_gpu_are_found(facts: dict):
    detail_names = {name for name, *_ in report.DETAILS}
    assert detail_names - facts.keys() == {"llama_kernel_step", "rival_rate", "rival_done"}
    # A tiny Llama: an embedding and a head of 128 x 32, and in its one layer 7,168 weights and
    # three norms.
    assert facts["llama_weight_bytes"] == 4 * (
        128 * 32 + 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 3 * 32
    )


def test_what_arrives_is_counted_from_the_first_quarter_on(facts: dict):
    assert facts["mixed_share"] > 0 and facts["mixed_rate"] > 0
    bench = Bench(
        shapes.tiny(shapes.LLAMA_8B),
        "cpu",
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=32,
        kv_cache_memory=1 << 22,
    )
    prompts, outputs, seconds = arrive(bench, 1e4, 8, 10, 5)
    steps = bench.executor.steps
    assert sum(step.num_prompt_tokens for step in steps) == 80
    assert sum(step.num_tokens - step.num_prompt_tokens for step in steps) >= 8 * 4
    assert 0 <= prompts <= 80 and 0 <= outputs and 0 < seconds < 60
    assert not bench.engine.has_work


def test_a_failed_part_is_named_and_the_rest_is_kept(monkeypatch, tmp_path, capfd):
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
    figures = next(block for block in page.split("\n\n") if block.startswith("| figure |"))
    assert ", a GPU, torch" in page and table.strip().endswith(figures)


# Packages of servd that a bare GPU machine lacks; docs/explanation/gpu.md lists those that it has.
LACKS = (
    "fastapi",
    "gguf",
    "httptools",
    "llguidance",
    "multipart",
    "openai",
    "prometheus_client",
    "psutil",
    "pydantic",
    "starlette",
    "uvicorn",
    "uvloop",
    "zmq",
)
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
        [sys.executable, "-c", WITHOUT, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_a_bare_gpu_machine_collects_all_tests_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(GPU_TESTS\w*) = (.*)$", makefile, flags=re.MULTILINE))
    paths = ["tests/worker/gates/test_kernels_compile.py", *" ".join(variables.values()).split()]
    assert "tests/worker/attention" in paths and "tests/worker/test_memory.py" in paths
    options = ("-p", "no:cacheprovider", "-m", "not slow", "--collect-only", "-q")
    done = run_on_bare_machine("pytest", *options, *paths)
    assert done.returncode == 0, done.stdout[-3000:]
    for path in paths:
        assert f"\n{path}" in "\n" + done.stdout, f"{path} has no test there"


@pytest.mark.parametrize("part", ["attention", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_bare_gpu_machine_measures(part: str):
    done = run_on_bare_machine("benchmarks.gpu", "--tiny", "--part", part)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("FACTS ")
