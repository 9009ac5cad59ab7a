"""The tests of the openai client again, under its current major version. That is installed into
a folder of its own: two versions do not fit into one environment.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
question = {"type": "choice", "instructions": "?", "choices": [{"value": True}, {"value": "a"}]}
decision = client.decisions.create(model="tiny", input="hi", questions=[question])
[answer] = decision.answers
assert answer.type == "choice" and answer.choice in (True, "a"), answer
assert abs(sum(p.probability for p in answer.probabilities) - 1) < 1e-6, answer
print(openai.__version__, decision.usage.total_tokens)
"""


@pytest.fixture(scope="session")
def openai3() -> dict[str, str]:
    """An environment in which `import openai` finds version 3."""
    cache = Path(os.environ.get("SERVD_TEST_CACHE", Path.home() / ".cache/servd-tests"))
    folder = cache / "openai-3"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, "openai>=3,<4"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"openai 3 cannot be installed: {done.stderr[-300:]}")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_version_3_passes_the_tests_of_version_2(openai3):
    version = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    assert subprocess.check_output(version, env=openai3, text=True).startswith("3.")
    command = [sys.executable, "-m", "pytest", "-q", "tests/integration/test_clients_openai.py"]
    done = subprocess.run(command, env=openai3, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_decisions_of_the_client(openai3, llama_server):
    command = [sys.executable, "-c", DECISIONS, llama_server.url]
    done = subprocess.run(command, env=openai3, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("3.")
