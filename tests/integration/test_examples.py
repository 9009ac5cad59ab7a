"""Each file in examples/ does what it says, with the demo model and as its reader would run it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import LAST_ENGINE, Server, shared
from tests.limits import WAIT_SECONDS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

ELSEWHERE = {"train_adapter.py", "disaggregated_proxy.py"}  # have tests of their own
# File -> what it prints, among other things. Every other file of examples/ must be here.
PRINTS = {
    "chat.py": ["8000", " tokens"],
    "offline.py": ["'The capital of France is' -> ", "choice 2: ", "prompt tokens"],
    "streaming.py": ["Mia", " tokens"],
    "structured_output.py": ["Anna is 31 and lives in Oslo"],
    "tools.py": ['get_weather({"city": "Paris"})', "21"],
}


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    yield from shared("--device", "cpu", *LAST_ENGINE)


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - ELSEWHERE))
def test_example(name: str, demo_server: Server):
    example = subprocess.run(
        [sys.executable, EXAMPLES / name, *([] if name == "offline.py" else [demo_server.url])],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert example.returncode == 0, example.stderr
    for part in PRINTS[name]:
        assert part in example.stdout
