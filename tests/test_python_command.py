"""Processes of servd start in a folder whose directory `servd` hides the installed package."""

import json
import subprocess
from pathlib import Path

import pytest

from servd.base.errors import ModelNotFound, Unavailable
from servd.base.python_command import python_command
from servd.checkpoint import hub
from servd.checkpoint.tokenizer_files import find_tokenizer
from servd.gateway.pull import pull
from tests.limits import WAIT_SECONDS

SERVD = Path(python_command.__code__.co_filename).parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which holds a clone."""
    (tmp_path / "servd").mkdir()
    (tmp_path / "servd" / "__init__.py").write_text("raise SystemExit('hidden')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_a_tokenizer_is_converted(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "tokenizer.model").touch()
    with pytest.raises(ModelNotFound, match="cannot be converted: (?!hidden)"):
        find_tokenizer(str(folder))


async def test_a_model_is_pulled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "blobs_to_download", lambda model: {})
    with pytest.raises(Unavailable, match="cannot get 'org/name' from the hub"):
        [line async for line in pull("org/name", folder)]


def test_the_reference_of_vectors_is_computed():
    command = python_command("servd.worker.runner.reference_check")
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.stderr.endswith("ValueError: not enough values to unpack (expected 3, got 0)\n")


def test_a_batch_is_run(folder: Path):
    body = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
    (folder / "in.jsonl").write_text(json.dumps(body))
    command = python_command("servd", "run-batch", "--executor", "fake")
    command += ["-i", "in.jsonl", "-o", "out.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("servd: requests: 1 in")  # and nothing of the server's log


def test_all_processes_are_started_by_this_command():
    files = {file.relative_to(SERVD) for file in SERVD.rglob("*.py")}
    assert {f for f in files if "sys.executable" in (SERVD / f).read_text()} == {
        Path("base/python_command.py")
    }
