"""`X-Servd-Run-Manifest: 1` states what made an answer, and `servd replay` repeats it."""

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from servd import cli
from servd.api.serving import run_manifest
from servd.api.serving.run_manifest import (
    RepeatablePrompt,
    RunManifest,
    hash_weights,
    make_manifest,
)
from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.cli import replay as command
from servd.config import Config
from servd.messages.engine import WorkerReady
from servd.messages.params import SamplingParams
from servd.offline.llm import LLM
from tests.api.harness import MODEL, serve, user
from tests.limits import WAIT_SECONDS

HEADERS = {"X-Servd-Run-Manifest": "1"}
CHAT = {"messages": user("hi"), "max_tokens": 8, "n": 2, "temperature": 0.7}


def replay(*args: str) -> int:
    arguments = cli.make_parser().parse_args(["replay", *args])
    return arguments.run(arguments)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 4, "n": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"model": MODEL, "messages": user("hi"), "max_tokens": 4, "stream": True}),
    ],
)
async def test_an_answer_is_repeated_by_its_manifest(path: str, body: Any, tmp_path: Path, capsys):
    async with serve() as served:
        answer = await served.http.post(path, json=body, headers=HEADERS)
        plain = await served.http.post(path, json=body)
    assert "run_manifest" not in plain.text
    (tmp_path / "answer").write_text(answer.text)
    made = command.read_manifest(str(tmp_path / "answer"))
    choices = [ids for prompt in made.prompts for ids in prompt.token_ids]
    assert len(choices) == len(made.prompts) * body.get("n", 1) and all(choices)
    options = ("--executor", "fake", "--max-model-len", "4096")
    assert replay(str(tmp_path / "answer"), *options) == 0
    output = capsys.readouterr().out
    assert output.count("all the same") == len(choices)
    assert "not the same" not in output


def test_the_first_token_that_differs_is_named_with_its_margin(tmp_path: Path, capsys):
    params = SamplingParams(max_tokens=6, temperature=0)
    llm = LLM("demo", device="cpu", use_tqdm=False)
    try:
        [output] = llm.generate(["The sun"], params)
        engine = llm.engine
        config, spec = engine.processor.config, engine.processor.spec
        made = make_manifest(config, spec, engine.engine_core.worker, [])
    finally:
        llm.close()
    token_ids = [*output.outputs[0].token_ids]
    token_ids[3] += 1
    prompt = RepeatablePrompt(output.prompt_token_ids, params, 0, [token_ids])
    made = msgspec.structs.replace(made, prompts=[prompt], weights="another")
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(made))
    assert replay(str(tmp_path / "manifest.json"), "demo", "--device", "cpu") == 1
    printed = capsys.readouterr().out
    assert f"({token_ids[3]}) and is" in printed and "token 3 was" in printed
    margin = float(printed.partition("the new one by ")[2].split()[0])
    assert margin > 0 and ("no tie" in printed) == (margin >= 1e-3)
    assert "not the same: weights: another then" in printed


async def test_manifests_of_servd_0_1_are_read(tmp_path: Path):
    async with serve() as served:
        headers = {"X-Servd-Receipt": "1"}
        answer = await served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    manifest = answer.json()["run_manifest"]
    comment = f"data: 1\n\n: receipt {json.dumps(manifest)}\n"
    old = tmp_path / "old"
    for text in (json.dumps({"receipt": manifest}), comment):
        old.write_text(text)
        assert msgspec.to_builtins(command.read_manifest(str(old))) == manifest


async def test_a_manifest_names_no_places_and_beam_search_has_none():
    async with serve() as served:
        answer = await served.http.post("/v1/chat/completions", json=CHAT, headers=HEADERS)
        beam = CHAT | {"use_beam_search": True}
        refused = await served.http.post("/v1/chat/completions", json=beam, headers=HEADERS)
    made = json.dumps(answer.json()["run_manifest"])
    assert MODEL not in made and "/" not in made
    assert refused.status_code == 400 and "X-Servd-Run-Manifest" in refused.text


def test_weights_are_known_by_their_contents(tmp_path: Path):
    first, second = tmp_path / "one", tmp_path / "other"
    for folder in (first, second):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    hash_weights.cache_clear()
    assert hash_weights(str(first)) == hash_weights(str(second))
    (second / "model.safetensors").write_bytes(b"others")
    hash_weights.cache_clear()
    assert hash_weights(str(first)) != hash_weights(str(second))


def test_manifest_hashes_exclude_paths():
    def configuration(**options: Any) -> str:
        worker = WorkerReady("cpu", "float32", "torch", 1, 0, 0)
        return make_manifest(Config.load(options), FAKE_SPEC, worker, []).configuration

    assert configuration() == configuration(model="a", download_dir="b", served_model_name=["c"])
    assert configuration() != configuration(block_size=32)
    assert configuration() != configuration(dtype="bfloat16")


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"run_manifest": 1}', b"\xff\xfe", b"[" * 100_000]
)
def test_what_is_no_manifest_is_refused(text: bytes, tmp_path: Path):
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(ConfigError, match="no run manifest"):
        command.read_manifest(str(tmp_path / "x"))


@pytest.mark.parametrize("num_choices", [0, 1, 3])
def test_a_manifest_has_as_many_choices_as_were_asked_for(num_choices: int, tmp_path: Path):
    prompt = RepeatablePrompt([1], SamplingParams(n=2), 0, [[1]] * num_choices)
    manifest = RunManifest({}, "", "", "cpu", "float32", "torch", [prompt])
    (tmp_path / "x").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(ConfigError, match="more or fewer choices"):
        command.read_manifest(str(tmp_path / "x"))


def test_weights_are_read_once_though_several_ask_at_the_same_time(tmp_path: Path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hash_weights.cache_clear()
    together, reads = threading.Barrier(4), []

    def digest(file: IO[bytes], name: str) -> Any:
        reads.append(file.name)
        time.sleep(0.05)  # in which the others come
        return hashlib.new(name, file.read())

    spec = msgspec.structs.replace(FAKE_SPEC, folder=str(tmp_path))
    worker = WorkerReady("cpu", "float32", "torch", 1, 0, 0)

    def ask(_: int) -> str:
        together.wait(WAIT_SECONDS)
        return make_manifest(Config.load({}), spec, worker, []).weights

    monkeypatch.setattr(run_manifest.hashlib, "file_digest", digest)
    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(ask, range(4))}) == 1
    assert len(reads) == 1
