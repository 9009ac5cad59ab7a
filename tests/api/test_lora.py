"""Adapters over HTTP: named as models, listed, loaded, replaced and unloaded."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from servd.api.engine.adapters import Adapters
from servd.api.engine.async_llm import AsyncLLM
from servd.base.errors import ConfigError
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.lora import TENSORS
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import LoRAConfig
from servd.messages.engine import EngineReady, WorkerReady
from tests.adapters import write_adapter
from tests.api.harness import MODEL, Served, serve, until
from tests.fake_tokens import expected_tokens

OTHER_MODEL = WorkerReady("cpu", "float32", "native", 1, 1, 1, adaptable={"layers.0.other": (8, 6)})
PROMPT = "the same words again and again: "


@asynccontextmanager
async def serve_adapters(folder: Path, **options) -> AsyncIterator[tuple[Served, AdapterStore]]:
    """A server of the adapters in folder/adapters."""
    (folder / "adapters").mkdir(exist_ok=True)
    store = AdapterStore(folder / "store")
    options = {"enable_lora": True, "lora_dir": str(folder / "adapters")} | options
    async with serve(store=store, **options) as served:
        await until(lambda: served.async_llm.is_ready)
        yield served, store


async def text_of(served: Served, model: str, prompt: str = PROMPT) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 16}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def expected(digest: str, prompt: str = PROMPT) -> str:
    """What the fake says with an adapter of these bytes."""
    token_ids = expected_tokens([*prompt.encode()], 16, FAKE_SPEC.vocab_size, digest)
    return bytes(token_ids).decode()


async def load(served: Served, name: str, path: str, **fields):
    body = {"lora_name": name, "lora_path": path, **fields}
    return await served.http.post("/v1/load_lora_adapter", json=body)


async def test_an_adapter_in_the_folder_is_served_by_its_name(tmp_path: Path):
    async with serve_adapters(tmp_path) as (served, store):
        write_adapter(tmp_path / "adapters" / "sql", seed=1)
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed][2:] == [("sql", MODEL)]
        assert listed[2]["root"] == "sql"
        assert await text_of(served, "sql") == expected(store.read_adapters()["sql"].digest)
        assert await text_of(served, MODEL) == expected("0")
        assert await text_of(served, "sql") == expected(store.read_adapters()["sql"].digest)
        card = (await served.http.get("/v1/models/sql")).json()
        assert (card["id"], card["parent"]) == ("sql", MODEL)


async def test_folders_that_could_not_be_served_are_not_listed(tmp_path: Path):
    async with serve_adapters(tmp_path) as (served, _):
        folder = tmp_path / "adapters"
        write_adapter(folder / "good")
        write_adapter(folder / "dora", use_dora=True)
        (write_adapter(folder / "cut-off") / "adapter_model.safetensors").write_bytes(b"")

        async def listed() -> list[str]:
            cards = (await served.http.get("/v1/models")).json()["data"]
            return [card["id"] for card in cards if card["parent"]]

        assert await listed() == ["good"]
        write_adapter(folder / "dora")  # trained again, without
        assert await listed() == ["dora", "good"]


async def test_a_refused_adapter_is_unlisted_until_it_changes(tmp_path: Path, monkeypatch):
    async with serve_adapters(tmp_path) as (served, store):
        file = write_adapter(tmp_path / "adapters" / "nan") / TENSORS
        tensors = load_file(file)
        next(iter(tensors.values()))[0] = np.nan
        save_file(tensors, file)
        copied = Mock(wraps=store._copy)
        monkeypatch.setattr(store, "_copy", copied)
        body = {"model": "nan", "prompt": "a"}
        for _ in range(2):
            answer = await served.http.post("/v1/completions", json=body)
            assert answer.status_code == 400 and "NaN" in answer.text, answer.text
            assert str(tmp_path) not in answer.text
            assert '"nan"' not in (await served.http.get("/v1/models")).text
        copied.assert_called_once()
        assert (await load(served, "other", "nan")).status_code == 400
        assert copied.call_count == 2, "who loads it has it looked at"
        write_adapter(file.parent, lora_alpha=16)
        assert '"nan"' in (await served.http.get("/v1/models")).text
        assert await text_of(served, "nan") == expected(store.read_adapters()["nan"].digest)


def test_only_files_that_were_read_are_refused_unread(tmp_path: Path, monkeypatch):
    store = AdapterStore(tmp_path / "store")
    folder = write_adapter(tmp_path / "adapter")

    def load(source: str, if_taken: Literal["keep", "replace"] = "keep") -> None:
        store.load("name", source, 8, {}, if_taken)

    def num_refusals() -> int:
        return len([*store.folder.glob("refused-*")])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError("too many open files")))
        with pytest.raises(ConfigError):
            load(str(folder))
    for number in range(3):
        with pytest.raises(ConfigError):
            load(f"{folder}-{number}", "replace")
    assert num_refusals() == 0
    write_adapter(folder, use_dora=True)
    for source in (f"{folder}", f"{folder}/../adapter", f"{folder}/."):
        with pytest.raises(ConfigError, match="use_dora"):
            load(source, "replace")
    assert num_refusals() == 1
    write_adapter(folder)
    load(str(folder))


def test_adapters_listed_during_loading_are_checked_again(tmp_path: Path):
    write_adapter(tmp_path / "adapters" / "of-another-model")
    engine = SimpleNamespace(status=None, is_ready=False)
    config = LoRAConfig(enable_lora=True, lora_dir=str(tmp_path / "adapters"))
    adapters = Adapters(config, cast(AsyncLLM, engine), AdapterStore(tmp_path / "store"))
    assert [adapter.name for adapter in adapters.listed()] == ["of-another-model"]
    engine.is_ready, engine.status = True, EngineReady(OTHER_MODEL, 1, 1)
    assert adapters.listed() == []


async def test_of_those_that_requests_load_the_ones_used_last_stay(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("servd.checkpoint.adapter_store.MAX_ON_DEMAND", 2)
    async with serve_adapters(tmp_path) as (served, store):
        for seed, name in enumerate("abcd"):
            write_adapter(tmp_path / "adapters" / name, seed=seed)
        assert (await load(served, "kept", "d")).status_code == 200
        for name in "abac":
            await text_of(served, name)
        assert sorted(store.read_adapters()) == ["a", "c", "kept"]
        await text_of(served, "b")
        assert sorted(store.read_adapters()) == ["b", "c", "kept"]


async def test_loading_replacing_and_unloading(tmp_path: Path):
    async with serve_adapters(tmp_path) as (served, store):
        at = tmp_path / "adapters" / "run-1"
        write_adapter(at, seed=1)
        assert (await load(served, "chat", "run-1")).status_code == 200
        first = store.read_adapters()["chat"].digest
        again = await load(served, "chat", str(at))
        assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
        write_adapter(at, seed=2)
        assert await text_of(served, "chat") == expected(first)
        assert (await load(served, "chat", "run-1", load_inplace=True)).status_code == 200
        second = store.read_adapters()["chat"].digest
        assert first != second and await text_of(served, "chat") == expected(second)
        unload = {"lora_name": "chat"}
        answer = await served.http.post("/v1/unload_lora_adapter", json=unload)
        assert answer.status_code == 200 and "removed" in answer.text
        answer = await served.http.post("/v1/unload_lora_adapter", json=unload)
        assert answer.status_code == 404
        body = {"model": "chat", "prompt": "hi"}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_requests_keep_the_adapter_that_they_began_with(tmp_path: Path):
    """Replaced while they wait, run, and are sent to the next engine."""
    async with serve_adapters(tmp_path, max_num_seqs=2) as (served, store):
        at = write_adapter(tmp_path / "adapters" / "a", seed=1)
        await load(served, "a", "a")
        before = store.read_adapters()["a"].digest
        served.engine.may_step.clear()
        prompts = [f"{PROMPT}{i}" for i in range(5)]
        waiting = [asyncio.create_task(text_of(served, "a", prompt)) for prompt in prompts]
        await until(lambda: len(served.engine.core.scheduler.requests) == 5)
        write_adapter(at, seed=2)
        assert (await load(served, "a", "a", load_inplace=True)).status_code == 200
        late = asyncio.create_task(text_of(served, "a", prompts[0]))
        await until(lambda: len(served.engine.core.scheduler.requests) == 6)
        served.engine.die()
        await until(lambda: served.engine.generation == 1)
        served.engine.revive()
        served.engine.may_step.set()
        for prompt, task in zip(prompts, waiting, strict=True):
            assert await task == expected(before, prompt)
        after = store.read_adapters()["a"].digest
        assert await late == expected(after, prompts[0]) and after != before


FORBIDDEN = ("/etc", "../store", "link", "linked-file", ".", "a\0b")
WRONG = [("x", "missing"), ("../x", "a"), (MODEL, "a"), ("", "a"), ("x", "")]
REFUSED = [*(("x", path, 403) for path in FORBIDDEN), *((*case, 400) for case in WRONG)]


@pytest.mark.parametrize(("name", "path", "status"), REFUSED)
async def test_what_cannot_be_loaded(tmp_path: Path, name: str, path: str, status: int):
    outside = write_adapter(tmp_path / "outside")
    async with serve_adapters(tmp_path) as (served, store):
        folder = tmp_path / "adapters"
        write_adapter(folder / "a")
        (folder / "link").symlink_to(outside)
        (folder / "linked-file").mkdir()
        for file in outside.iterdir():
            (folder / "linked-file" / file.name).symlink_to(file)
        answer = await load(served, name, path)
        assert answer.status_code == status, answer.text
        for model in ("link", "linked-file", "../outside", "..", "a/../../outside"):
            body = {"model": model, "prompt": "hi"}
            assert (await served.http.post("/v1/completions", json=body)).status_code == 404
        assert store.read_adapters() == {}


async def test_what_is_not_supported_is_said_to_the_client(tmp_path: Path):
    async with serve_adapters(tmp_path) as (served, _):
        write_adapter(tmp_path / "adapters" / "dora", use_dora=True)
        answer = await load(served, "dora", "dora")
        assert answer.status_code == 400 and "use_dora" in answer.json()["error"]["message"]


async def test_without_a_folder_or_without_lora_nothing_is_loaded(tmp_path: Path):
    async with serve_adapters(tmp_path, lora_dir=None) as (served, _):
        answer = await load(served, "x", "x")
        assert answer.status_code == 403 and "--lora-dir" in answer.text
    async with serve() as served:
        answer = await load(served, "x", "x")
        assert answer.status_code == 404 and "--enable-lora" in answer.text


async def test_metrics_name_the_adapters_that_run_and_wait(tmp_path: Path):
    async with serve_adapters(tmp_path) as (served, _):
        for seed, name in enumerate("ab"):
            write_adapter(tmp_path / "adapters" / name, seed=seed)
        served.engine.step_seconds = 0.01
        tasks = [asyncio.create_task(text_of(served, name)) for name in "aabb"]
        await until(lambda: served.async_llm.engines[0].stats.waiting_adapters)
        metrics = (await served.http.get("/metrics")).text
        [line] = [line for line in metrics.splitlines() if line.startswith("vllm:lora_")]
        labels = re.findall(r'(max_lora|running_lora_adapters|waiting_lora_adapters)="(\w+)"', line)
        assert sorted(value for _, value in labels) == ["1", "a", "b"]
        await asyncio.gather(*tasks)
