"""`servd launch` with stand-ins for the agents: settings, exit codes, and how all of it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from servd.terminal import agents
from servd.terminal.api_client import Client
from servd.terminal.server_process import find_model
from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

# Writes what it was started with, asks the server for an answer, and ends as it is told.
STAND_IN = """#!{python}
import json, os, signal, sys, time, urllib.request
folder = os.path.dirname(os.path.abspath(__file__))
ends = []
signal.signal(signal.SIGINT, lambda *_: ends.append(5))
files = {{}}
for word in sys.argv:
    if os.path.isfile(word) and word != sys.argv[0]:
        files[os.path.basename(word)] = open(word).read()
record = {{"args": sys.argv[1:], "env": dict(os.environ), "files": files, "pid": os.getpid()}}
if "ANTHROPIC_BASE_URL" in os.environ:
    body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 4,
            "messages": [{{"role": "user", "content": "hi"}}]}}
    headers = {{"authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"],
               "content-type": "application/json"}}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    record["answer"] = json.load(urllib.request.urlopen(request))
with open(folder + "/seen.part", "w") as file:
    json.dump(record, file)
os.rename(folder + "/seen.part", folder + "/seen.json")
while "wait" in sys.argv and not ends:
    time.sleep(0.01)
sys.exit(ends[0] if ends else 7)
"""


class Launch:
    """Starts `servd launch` with a stand-in for each agent, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        for name in ("claude", "codex", "opencode", "aider", "cn"):
            file = folder / name
            file.write_text(STAND_IN.format(python=sys.executable))
            file.chmod(0o755)

    def start(self, *args: str) -> subprocess.Popen[str]:
        path = f"{self.folder}:{os.environ['PATH']}"
        process = subprocess.Popen(
            [sys.executable, "-m", "servd", "launch", *args],
            env={**os.environ, "PATH": path, "ANTHROPIC_API_KEY": "the user's"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, *args: str) -> tuple[int, str]:
        """The exit code and the errors."""
        process = self.start(*args)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
        return process.returncode, errors

    def wait_for_agent(self) -> dict[str, Any]:
        """What the stand-in saw."""
        file = self.folder / "seen.json"
        deadline = time.monotonic() + WAIT_SECONDS
        while not file.exists():
            assert time.monotonic() < deadline
            assert self.processes[-1].poll() is None, self.processes[-1].communicate()
            time.sleep(0.02)
        return json.loads(file.read_text())


@pytest.fixture
def launch(tmp_path: Path):
    launch = Launch(tmp_path)
    yield launch
    for process in launch.processes:
        if process.poll() is None:
            process.terminate()
        process.wait(WAIT_SECONDS)
        assert process.stderr is not None
        process.stderr.close()


def settings_of(name: str, record: dict[str, Any]) -> tuple[str, str, int]:
    """The URL, the model and the context of which an agent was told."""
    env = record["env"]
    args = record["args"]
    if name == "claude":
        assert "ANTHROPIC_API_KEY" not in env
        window = int(env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
        return env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_DEFAULT_HAIKU_MODEL"], window
    if name == "codex":
        pairs = [word.split("=", 1) for word in args if "=" in word]
        keys = {key: msgspec.toml.decode(f"value = {text}")["value"] for key, text in pairs}
        url = keys["model_providers.servd.base_url"]
        return url.removesuffix("/v1"), keys["model"], keys["model_context_window"]
    if name == "opencode":
        config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
        provider = config["provider"]["servd"]
        model = config["model"].removeprefix("servd/")
        url = provider["options"]["baseURL"]
        return url.removesuffix("/v1"), model, provider["models"][model]["limit"]["context"]
    if name == "aider":
        [(model, limits)] = json.loads(record["files"]["metadata.json"]).items()
        assert model in args
        url = env["OPENAI_API_BASE"]
        return url.removesuffix("/v1"), model.removeprefix("openai/"), limits["max_input_tokens"]
    [model] = msgspec.yaml.decode(record["files"]["config.yaml"])["models"]
    context = model["defaultCompletionOptions"]["contextLength"]
    return model["apiBase"].removesuffix("/v1"), model["model"], context


@pytest.mark.parametrize("name", agents.NAMES)
def test_an_agent_gets_its_settings_and_arguments(fake_server: Server, launch: Launch, name: str):
    words = ["--output_format", "json", "-p", "--", "--url"]
    code, errors = launch.run(name, "--url", fake_server.url, "--", *words)
    assert code == 7, errors
    record = launch.wait_for_agent()
    assert record["args"][-5:] == words
    [model] = httpx.get(f"{fake_server.url}/v1/models").json()["data"]
    assert settings_of(name, record) == (fake_server.url, model["id"], model["max_model_len"])
    assert name != "claude" or record["answer"]["type"] == "message"


def test_a_running_server_is_used_if_it_has_the_model(fake_server: Server):
    client = Client(fake_server.url)
    [model] = httpx.get(f"{fake_server.url}/v1/models").json()["data"]
    assert find_model(client, {}) == find_model(client, {"model": model["id"]}) == model
    assert find_model(client, {"model": "another"}) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert find_model(Client(f"http://127.0.0.1:{port}"), {}) is None


OWN = ("claude", "--executor", "fake", "--max-model-len", "100000")


def test_a_server_of_its_own_has_a_key_and_ends(launch: Launch):
    code, errors = launch.run(*OWN, "--", "now")
    assert code == 7, errors
    record = launch.wait_for_agent()
    url, _, context = settings_of("claude", record)
    assert context == 100_000 and record["answer"]["type"] == "message"
    assert record["env"]["ANTHROPIC_AUTH_TOKEN"] != "none"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def end_by_sigterm(process: subprocess.Popen[str]) -> None:
    process.terminate()


def end_by_ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the agent gets it, too


@pytest.mark.parametrize(("end", "code"), [(end_by_sigterm, 143), (end_by_ctrl_c, 5)])
def test_all_processes_end(launch: Launch, end: Callable[[subprocess.Popen[str]], None], code: int):
    process = launch.start(*OWN, "--", "wait")
    launch.wait_for_agent()
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3, children  # the agent, the server and its processes
    end(process)
    assert process.wait(WAIT_SECONDS) == code
    _, alive = psutil.wait_procs(children, WAIT_SECONDS)
    assert alive == []


def test_an_agent_that_is_not_installed_is_a_sentence(launch: Launch, monkeypatch):
    monkeypatch.setenv("PATH", str(launch.folder / "empty"))
    (launch.folder / "codex").unlink()
    code, errors = launch.run("codex")
    assert code == 2 and "npm install -g @openai/codex" in errors and "Traceback" not in errors


def test_a_server_without_the_model_says_what_it_has(fake_server: Server, launch: Launch):
    code, errors = launch.run("claude", "another", "--url", fake_server.url)
    assert code == 2 and "another" in errors and "fake" in errors
    assert not (launch.folder / "seen.json").exists()
