"""Each file in examples/ does what it says, with the demo model and as its reader would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Server, shared

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# File -> what it prints, among other things. Every file of examples/ must be here.
PRINTS = {
    "chat.py": ["8000", " tokens"],
    "offline.py": ["'The capital of France is' -> ", "choice 2: ", "prompt tokens"],
    "streaming.py": ["Mia", " tokens"],
    "structured_output.py": ["Anna is 31 and lives in Oslo"],
    "tools.py": ['get_weather({"city": "Paris"})', "21"],
}


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    yield from shared("--device", "cpu")


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, EXAMPLES / name, *arguments],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name: str, demo_server: Server):
    example = start(name, *([] if name == "offline.py" else [demo_server.url]))
    stdout, stderr = example.communicate(timeout=60)
    assert example.returncode == 0, stderr
    for part in PRINTS[name]:
        assert part in stdout


def test_without_a_server_examples_say_so_in_one_line():
    url = "http://127.0.0.1:1"
    for example in [start(name, url) for name in PRINTS if name != "offline.py"]:
        _, stderr = example.communicate(timeout=60)
        assert stderr == f"no server answers at {url}: start one with `servd serve`\n"
        assert example.returncode == 1
