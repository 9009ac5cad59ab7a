"""The Vercel AI SDK and Ollama's client for JavaScript against a real server."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Server
from tests.integration.demo_answers import PERSON, QUESTION, WEATHER, ask, ask_person

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).parent / "js"
Run = Callable[[str], Any]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with the scripts and their packages, which npm installs."""
    for command in ("node", "npm"):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed")
    cache = Path(os.environ.get("SERVD_TEST_CACHE", Path.home() / ".cache/servd-tests"))
    folder = cache / "javascript-clients"
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefer-offline"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm cannot install the packages: {done.stderr[-300:]}")
    return folder


@pytest.fixture
def run(folder: Path, demo_server: Server) -> Run:
    """Run a script with the questions, and return what it prints."""
    settings = {"url": demo_server.url, "question": QUESTION, "weather": WEATHER, "person": PERSON}

    def run(name: str) -> Any:
        command = ["node", name, json.dumps(settings)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


def test_the_vercel_ai_sdk(run: Run, demo_server: Server):
    expected = ask(demo_server.url, QUESTION)
    text = expected["choices"][0]["message"]["content"]
    num_tokens = expected["usage"]["completion_tokens"]
    person = ask_person(demo_server.url).model_dump()
    results = run("vercel_ai.mjs")
    assert results.keys() == {"compatible", "responses", "chat"}
    for answer in results.values():
        assert (answer["text"], answer["finish"], answer["tokens"]) == (text, "stop", num_tokens)
        assert "".join(answer["parts"]) == text and len(answer["parts"]) > 1
        assert answer["streamed_tokens"] == num_tokens
        assert answer["cities"] == ["Paris"] and "17" in answer["told"]
        assert answer["person"] == person


def test_ollama(run: Run, demo_server: Server):
    expected = ask(demo_server.url, QUESTION)
    text = expected["choices"][0]["message"]["content"]
    results = run("ollama.mjs")
    assert results["whole"]["message"]["content"] == results["generated"] == text
    assert results["whole"]["eval_count"] == expected["usage"]["completion_tokens"]
    assert "".join(part["message"]["content"] for part in results["parts"]) == text
    assert [part["done"] for part in results["parts"]][-2:] == [False, True]
    call = results["call"]
    assert call["name"] == "get_weather" and call["arguments"]["city"] == "Paris"
    assert "17" in results["told"]
    assert results["person"] == ask_person(demo_server.url).model_dump()
    assert len(results["lengths"]) == 2 and min(results["lengths"]) > 0
    assert results["listed"] == results["loaded"] == ["demo:latest"]
    assert {"completion", "tools"} <= {*results["capabilities"]} and results["pulled"] == "success"
    assert tuple(map(int, results["version"].split("."))) > (0, 9)  # as some clients want it
    assert results["error"][0] == 404 and "is not served here" in results["error"][1]
