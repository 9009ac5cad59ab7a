"""Several models behind one port, whose servers run in this process here."""

import asyncio
import json
import os
import resource
import shutil
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import ollama
import psutil
import pytest

import servd
from servd.api.keys import ApiKeys
from servd.base import log
from servd.base.errors import ConfigError, InvalidRequest, ModelNotFound
from servd.checkpoint import hub, model_spec
from servd.config import Config
from servd.config.keys import hash_key
from servd.gateway.backend import ModelServer
from servd.gateway.models import GatewayModel, ModelFolder
from servd.gateway.pool import ModelServers
from servd.gateway.proxy import create_gateway
from servd.gateway.request import MAX_KEEP_ALIVE, seconds_of
from servd.gateway.server import check, link_models, reload
from tests import fake_hub, gguf_files
from tests.api.harness import Served, events, listening, serve, until
from tests.limits import WAIT_SECONDS

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 4096,
}
COMPLETIONS = "/v1/completions"
DEMO_TOKENIZER = Path(servd.__file__).parent / "demo_model" / "tokenizer.json"
BODY = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}


class Servers(ModelServers):
    """Servers on this event loop; `broken` cannot start, `slow` are ready when a test says so."""

    stopped: list[str]

    def __init__(self, config: Config, stack: AsyncExitStack) -> None:
        super().__init__(config, "")
        self.stack, self.options = stack, {}
        self.served: dict[str, Served] = {}
        self.broken: set[str] = set()
        self.slow: set[str] = set()
        self.launched: list[str] = []
        self.stopped = []
        self.most_awake = 0

    def is_switching(self) -> bool:
        return self._switch.locked()

    def options_of(self, name: str) -> Config:
        return self._config_of(self.servers[name], "")

    async def _launch(self, server: ModelServer) -> None:
        self.launched.append(server.name)
        ends_with = 1 if server.name in self.broken else None
        server.child = SimpleNamespace(exit_code=ends_with, stop=lambda timeout: None)  # type: ignore[assignment]
        access = msgspec.structs.asdict(self._config_of(server, "").access)
        names = {"served_model_name": [server.name], **access}
        is_ready = server.name not in self.broken | self.slow
        serving = serve(listen=True, is_ready=is_ready, **names, **self.options)
        served = await self.stack.enter_async_context(serving)
        served.http.headers["host"] = "model"  # as ModelServer.connect names it
        self.served[server.name], server.http = served, served.http

    async def _wake_up(self, server: ModelServer) -> None:
        await super()._wake_up(server)
        awake = [server for server in self.servers.values() if server.has_weights]
        self.most_awake = max(self.most_awake, len(awake))

    async def _stop(self, server: ModelServer) -> None:
        server.is_awake, server.loading_since, server.child = False, None, None
        self.stopped.append(server.name)


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def make_gguf(path: Path) -> bytes:
    """What says of itself that it is a Llama of one layer."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    sizes = {"block_count": 1, "context_length": 4096, "embedding_length": 8}
    sizes |= {"feed_forward_length": 8, "attention.head_count": 1}
    values = [text(f"llama.{key}") + struct.pack("<II", 4, size) for key, size in sizes.items()]
    values.append(text("general.architecture") + struct.pack("<I", 8) + text("llama"))
    names = ("token_embd.weight", "blk.0.attn_q.weight")
    tensors = [text(name) + struct.pack("<IQQIQ", 2, 8, 8, 0, 0) for name in names]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    path.write_bytes(head + b"".join(values + tensors) + bytes(512))
    return path.read_bytes()


@asynccontextmanager
async def gateway(
    folder: Path, *names: str, **options: object
) -> AsyncIterator[tuple[httpx.AsyncClient, Servers]]:
    for name in names:
        make(folder / name)
    config = Config.load({"models_dir": str(folder), **options})
    async with AsyncExitStack() as stack:
        servers = Servers(config, stack)
        app = create_gateway(config, servers, ApiKeys(config.access))
        url = await stack.enter_async_context(listening(app))
        client = httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS)
        http = await stack.enter_async_context(client)
        yield http, servers


async def test_default_parameters_are_those_of_each_model(tmp_path: Path):
    numbers = '{"top_p": 0.75, "max_new_tokens": 9}'
    lora = {"enable_lora": True, "lora_modules": [f"short={adapter(tmp_path / 'a', 'one')}"]}
    folder = tmp_path / "models"
    generations = {"one": '{"temperature": 0.5, "top_k": 9}', "broken": '{"temperature": "warm"}'}
    async with gateway(folder, "two", override_generation_config=numbers, **lora) as (http, _):
        for name, generation in generations.items():
            make(folder / name)
            (folder / name / "generation_config.json").write_text(generation)
        listed = (await http.get("/v1/models")).json()["data"]
        cards = {card["id"]: card["default_parameters"] for card in listed}
        shutil.copy(DEMO_TOKENIZER, folder / "one")
        lines = (await http.post("/api/show", json={"model": "one"})).json()["parameters"]
    expected = {"temperature": 0.5, "top_k": 9, "top_p": 0.75, "max_tokens": 9}
    assert cards["one"].items() >= expected.items() and cards["short"] == cards["one"]
    assert cards["two"] == cards["one"] | {"temperature": 1.0, "top_k": 0}
    assert cards["broken"] == {}
    assert {"temperature 0.5", "num_predict 9"} <= {*lines.splitlines()}


async def test_each_request_goes_to_the_model_it_names(tmp_path: Path):
    async with gateway(tmp_path, "one", "two", models_max=2) as (http, servers):
        assert (await http.get("/health")).status_code == 200 and servers.served == {}
        for name in ("one", "two", "one"):
            answer = await http.post(COMPLETIONS, json={**BODY, "model": name})
            assert answer.status_code == 200 and answer.json()["model"] == name
            assert answer.headers["x-request-id"] in answer.json()["id"]
        streamed = await http.post(COMPLETIONS, json={**BODY, "model": "two", "stream": True})
        assert {event["model"] for event in events(streamed.text) if event != "[DONE]"} == {"two"}
        # Without a name it is the one that was used last.
        assert (await http.post(COMPLETIONS, json=BODY)).json()["model"] == "two"
        assert (await http.get("/version", params={"model": "one"})).status_code == 200
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["state"]) for card in listed] == [
            ("one", "awake"),
            ("two", "awake"),
        ]
        card = (await http.get("/v1/models/two")).json()
        assert card["max_model_len"] == 4096 and card["permission"] == []
        assert card["created"] == int((tmp_path / "two" / "config.json").stat().st_mtime)
        lines = (await http.get("/metrics")).text.splitlines()
        counted = [line for line in lines if line.startswith("vllm:request_success_total{")]
        assert sorted(line.split()[-1] for line in counted if '"length"' in line) == ["2.0", "3.0"]
        assert lines.count("# TYPE vllm:request_success_total counter") == 1
        series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
        assert len(set(series)) == len(series)  # what has no model's name is summed
        name = f'http_requests_total{{handler="{COMPLETIONS}",method="POST",status="200"}}'
        assert f"{name} 5.0" in lines
        limit = f"{float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])}"
        # The gateway's own, not a sum.
        assert [x.split()[1:] for x in lines if x.startswith("process_max_fds")] == [[limit]]


async def test_ollama_s_lists_start_no_model(tmp_path: Path):
    async with gateway(tmp_path, "one", "two") as (http, servers):
        listed = (await http.get("/api/tags")).json()["models"]
        assert [model["name"] for model in listed] == ["one:latest", "two:latest"]
        assert (await http.get("/api/version")).status_code == 200
        assert (await http.post("/api/pull", json={"model": "two"})).json()["status"] == "success"
        assert (await http.post("/api/pull", json={"name": "x"})).status_code == 404
        assert (await http.get("/api/ps")).json()["models"] == [] and servers.launched == []
        answer = await http.post(
            "/api/chat", json={"model": "two:latest", "messages": [], "keep_alive": None}
        )
        assert answer.json()["done_reason"] == "load"
        assert [model["name"] for model in (await http.get("/api/ps")).json()["models"]] == [
            "two:latest"
        ]


async def test_what_no_model_can_answer_starts_none(tmp_path: Path):
    async with gateway(tmp_path, "one", api_key=["secret"]) as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 401
        key = {"authorization": "Bearer secret"}
        unknown = await http.post(COMPLETIONS, json={**BODY, "model": "no"}, headers=key)
        assert unknown.status_code == 404 and "has one" in unknown.json()["error"]["message"]
        assert (await http.get("/v1/models/no", headers=key)).status_code == 404
        assert servers.served == {}
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "one"}, headers=key)
        assert answer.status_code == 200
        # Keys are the model's own, too.
        assert (await servers.served["one"].http.post(COMPLETIONS, json=BODY)).status_code == 401


async def test_what_would_overflow_a_parser_is_a_400_before_any_model_starts(tmp_path: Path):
    async with gateway(tmp_path, "one", api_key=["secret"]) as (http, servers):
        head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: {'0' * 4301}\r\n\r\n"
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(head.encode())  # refused before authentication
        assert (await reader.readline()).split()[1] == b"400"
        assert b"Content-Length" in await reader.readuntil(b"}")
        writer.close()
        key = {"authorization": "Bearer secret"}
        for deep in ("[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000):
            body = f'{{"model": "one", "keep_alive": 5, "z": {deep}}}'
            answer = await http.post(COMPLETIONS, content=body, headers=key)
            assert answer.status_code == 400 and "deep" in answer.text
        assert servers.served == {}


async def test_models_take_turns_and_no_request_is_refused(tmp_path: Path):
    async with gateway(tmp_path, "one", "three", "two") as (http, servers):

        async def ask(i: int) -> str:
            name = ("one", "two", "three")[i % 3]
            answer = await http.post(COMPLETIONS, json={**BODY, "model": name})
            assert answer.status_code == 200, answer.text
            return answer.json()["model"]

        names = await asyncio.gather(*(ask(i) for i in range(30)))
        assert names == ["one", "two", "three"] * 10 and servers.most_awake == 1


async def test_a_model_that_is_never_idle_makes_room_in_time(tmp_path: Path):
    async with gateway(tmp_path, "one", "two") as (http, servers):
        is_over = asyncio.Event()

        async def keep_busy() -> None:
            while not is_over.is_set():
                body = {**BODY, "model": "one", "max_tokens": 50}
                assert (await http.post(COMPLETIONS, json=body)).status_code == 200

        busy = [asyncio.create_task(keep_busy()) for _ in range(4)]
        await until(lambda: servers.served)
        for _ in range(3):
            assert (await http.post(COMPLETIONS, json={**BODY, "model": "two"})).status_code == 200
        is_over.set()
        await asyncio.gather(*busy)


async def test_an_answer_that_is_not_read_holds_up_no_other_model(tmp_path: Path):
    async with gateway(tmp_path, "one", "two") as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        served = servers.served["one"]  # sleep does not wait for its engine
        served.engine.step_seconds = 0.05
        long = {**BODY, "model": "one", "max_tokens": 4000, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=long) as slow:
            lines = slow.aiter_lines()  # held, as its end would close the stream
            await anext(lines)
            answer = await http.post(COMPLETIONS, json={**BODY, "model": "two"})
            assert answer.status_code == 200 and servers.servers["one"].num_open == 1


async def test_the_wait_for_a_model_is_a_phase(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(log.MODEL, "one")  # as its processes have it
    async with gateway(tmp_path, "one") as (http, servers):
        servers.slow.add("one")
        forged = {"x-servd-since": "1"}
        body = {**BODY, "model": "one"}
        task = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=forged))
        await until(lambda: "one" in servers.served)
        await asyncio.sleep(0.5)
        engine = servers.served["one"].engine
        engine.tell(engine.ready)
        request_id = (await task).json()["id"]
        timeline = (await http.get(f"/v1/requests/{request_id}/timeline")).json()
        assert timeline["longest_wait"] == "model_load" and 500 < timeline["wall_ms"] < 60_000
        total = sum(phase["ms"] for phase in timeline["phases"])
        assert total == pytest.approx(timeline["wall_ms"], abs=0.1)


async def test_a_server_with_one_model_believes_no_client_when_it_began(http):
    forged = {"x-servd-since": "1"}
    request_id = (await http.post(COMPLETIONS, json=BODY, headers=forged)).json()["id"]
    timeline = (await http.get(f"/v1/requests/{request_id}/timeline")).json()
    assert timeline["wall_ms"] < 60_000


async def test_a_client_that_leaves_ends_its_request(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        served = servers.served["one"]
        served.engine.step_seconds = 0.05
        body = {**BODY, "model": "one", "max_tokens": 4000, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: not served.async_llm.num_unfinished)
        assert servers.servers["one"].num_open == 0


async def test_a_model_that_cannot_be_started(tmp_path: Path):
    async with gateway(tmp_path, "one", "two") as (http, servers):
        servers.broken.add("one")
        for _ in range(2):
            answer = await http.post(COMPLETIONS, json={**BODY, "model": "one"})
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert "could not be started" in answer.json()["error"]["message"]
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "two"})).status_code == 200


async def test_sleep_is_shown_and_asking_for_it_loads_nothing(tmp_path: Path):
    key = {"authorization": "Bearer secret"}
    async with gateway(tmp_path, "one", "two", models_max=2, api_key=["secret"]) as (http, servers):
        http.headers.update(key)

        async def states() -> list[str]:
            return [card["state"] for card in (await http.get("/v1/models")).json()["data"]]

        query = {"model": "one"}
        assert (await http.get("/is_sleeping", params=query)).json() == {"is_sleeping": True}
        assert (await http.post("/sleep", params=query)).json() == {"is_sleeping": True}
        assert servers.served == {}
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        assert (await http.get("/is_sleeping", params=query)).json() == {"is_sleeping": False}
        assert (await http.post("/sleep", params=query)).json() == {"is_sleeping": True}
        assert await states() == ["asleep", "stopped"]
        assert (await http.post("/wake_up", params=query)).json() == {"is_sleeping": False}
        assert await states() == ["awake", "stopped"]
        # Scrapers may send their key in either header.
        del http.headers["authorization"]
        text = (await http.get("/metrics", headers={"x-api-key": "secret"})).text
        assert "vllm:engine_sleep_state{" in text


async def test_no_call_of_workers_reaches_a_model_that_it_does_not_name(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, _servers):
        call = {"method": "start_profile"}
        answer = await http.post("/collective_rpc", json=call)
        assert answer.status_code == 400 and "add ?model=NAME" in answer.text
        answer = await http.post("/collective_rpc?model=one", json=call)
        assert answer.json() == {"results": [None]}


async def test_the_folder_is_read_again(tmp_path: Path):
    async with gateway(tmp_path, "one", "gone") as (http, servers):

        async def names() -> list[str]:
            return [card["id"] for card in (await http.get("/v1/models")).json()["data"]]

        assert (await http.post(COMPLETIONS, json={**BODY, "model": "gone"})).status_code == 200
        assert await names() == ["gone", "one"]
        shutil.rmtree(tmp_path / "gone")
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "gone"})
        assert answer.status_code == 404 and await names() == ["one"]
        make(tmp_path / "later")
        (tmp_path / "no model").mkdir()
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "later"})
        assert answer.json()["model"] == "later" and await names() == ["later", "one"]
        assert servers.most_awake == 1  # that of the one that is gone has made room


async def test_another_model_of_the_name_takes_the_place_of_one_that_is_gone(tmp_path: Path):
    make_gguf(tmp_path / "one.gguf")
    async with gateway(tmp_path) as (http, servers):
        body = {**BODY, "model": "one"}
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200
        (tmp_path / "one.gguf").unlink()
        assert (await http.post(COMPLETIONS, json=body)).status_code == 404
        make(tmp_path / "one")
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200
        assert servers.launched == ["one", "one"]
        assert (await http.get("/v1/models/one")).json()["root"] == "one"


async def test_no_server_is_started_once_the_front_ends(tmp_path: Path):
    async with gateway(tmp_path, "one", "two") as (http, servers):
        servers.slow.add("one")
        bodies = [{**BODY, "model": name} for name in ("one", "two")]
        tasks = [asyncio.create_task(http.post(COMPLETIONS, json=body)) for body in bodies]
        await until(lambda: servers.served)
        await servers.close()
        assert [(await task).status_code for task in tasks] == [503, 503]
        assert servers.launched == ["one"]


async def test_a_server_that_dies_in_an_answer_cuts_it(tmp_path: Path, caplog):
    async def dies(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})

    async with AsyncExitStack() as stack:
        http, servers = await stack.enter_async_context(gateway(tmp_path, "one"))
        body = {**BODY, "model": "one"}
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200
        url = await stack.enter_async_context(listening(dies))
        servers.servers["one"].http = httpx.AsyncClient(base_url=url)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await http.post(COMPLETIONS, json=body)
        failed = [record for record in caplog.records if record.levelname == "ERROR"]
        assert any("one: its server ended during an answer" in record.message for record in failed)
        assert not any(record.exc_info for record in failed)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "two", "prompt": "a", "x": NaN}', 400),
        (b'{"model": "two", "prompt": "a"', 400),
        (b'{"model": "", "prompt": "a"}', 404),
        (b'{"a":' * 100_000, 400),
        (b'{"model": "one", "a":' + b"[" * 100_000, 400),
    ],
)
async def test_what_cannot_be_read_loads_no_model(tmp_path: Path, body: bytes, status: int):
    async with gateway(tmp_path, "one", "two") as (http, servers):
        answer = await http.post(COMPLETIONS, content=body)
        assert answer.status_code == status and servers.launched == []


@pytest.mark.parametrize("body", [b'{"model": 5}', b"\xff"])
async def test_what_is_no_request_is_not_the_servers_fault(tmp_path: Path, body: bytes):
    async with gateway(tmp_path, "one") as (http, _):
        headers = {"content-type": "application/json"}
        answer = await http.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 400, answer.text


async def test_a_folder_without_models_says_so(tmp_path: Path):
    async with gateway(tmp_path) as (http, _):
        for answer in (await http.post(COMPLETIONS, json=BODY), await http.get("/v1/cache")):
            assert answer.status_code == 404
            assert "no model is served here" in answer.json()["error"]["message"]


async def test_folders_in_folders_and_single_files(tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    make(tmp_path / "org" / "inner")
    snapshot = tmp_path / "models--hub--cached" / "snapshots" / "abc"
    make(snapshot)
    (snapshot / "model.safetensors").touch()
    make(snapshot.parent / "old")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    make(tmp_path / ".locks" / "hidden")
    tiny = make_gguf(tmp_path / "tiny.gguf")
    async with gateway(tmp_path, "one") as (http, servers):
        (tmp_path / "torn.gguf").write_bytes(tiny[:100])
        odd = tmp_path / "models--hub--odd" / "refs" / "main"
        odd.parent.mkdir(parents=True)
        odd.write_bytes(b"\xff")
        is_file = Path.is_file

        def is_file_if_allowed(path: Path) -> bool:
            if "lost+found" in path.parts:
                raise PermissionError(13, "Permission denied")
            return is_file(path)

        (tmp_path / "lost+found").mkdir()
        (tmp_path / "org" / "lost+found").mkdir()
        monkeypatch.setattr(Path, "is_file", is_file_if_allowed)
        for _ in range(2):
            await http.get("/v1/models")
        listed = (await http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["hub/cached", "one", "org/inner", "tiny"]
        assert [card["root"] for card in listed] == [card["id"] for card in listed]
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "org/inner"})
        assert answer.json()["model"] == "org/inner"
        assert (await http.get("/v1/models/org/inner")).json()["state"] == "awake"
        assert servers.servers["tiny"].model.facts.num_bytes == len(tiny)
        warned = [message for message in caplog.messages if "not serving" in message]
        assert len(warned) == 2 and "odd" in warned[0] and "torn" in warned[1]


async def test_a_client_that_leaves_while_its_model_starts(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, servers):
        servers.slow.add("one")
        body = {**BODY, "model": "one"}
        first = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await until(lambda: servers.served)
        first.cancel()
        await until(lambda: not servers.is_switching())
        second = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await until(servers.is_switching)  # it waits, too, and is not refused
        servers.served["one"].engine.revive()
        assert (await second).status_code == 200 and servers.launched == ["one"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/%2e%2e/version", 404),
        ("/x/../version", 404),
        ("//model/version", 404),
        ("/version%3Fx", 404),
        ("/version?x=%00", 200),
        ("/%00", 404),
        ("/v1/files", 404),
    ],
)
async def test_paths_are_passed_on_as_they_came(tmp_path: Path, path: Any, status: Any):
    async with gateway(tmp_path, "one") as (http, _):
        answer = await http.get("/", extensions={"target": path.encode()})
        assert answer.status_code == status, answer.text


# Its alignment is a text.
ODD_GGUF = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 17) + b"general.alignment"
ODD_GGUF += struct.pack("<IQ", 8, 1) + b"x"


async def test_a_folder_that_cannot_be_served_is_left_out(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, _):
        for name in (b"dangling", b"\xff"):
            folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "dangling" / "model.safetensors").symlink_to("nowhere")
        (tmp_path / "nested").mkdir()
        (tmp_path / "nested" / "config.json").write_text("[" * 100_000)
        (tmp_path / "a.gguf").write_bytes(ODD_GGUF)
        for name, ref in (("pull", "refs/pr/1"), ("bytes", "main"), ("long", "main")):
            file = tmp_path / f"models--org--{name}" / "refs" / ref
            file.parent.mkdir(parents=True)
            file.write_bytes({"pull": b"abc", "bytes": b"\xff\xfe", "long": b"a" * 5000}[name])
        listed = await http.get("/v1/models")
        assert [card["id"] for card in listed.json()["data"]] == ["one"]


async def test_a_start_that_hangs_ends_and_others_go_on(tmp_path: Path):
    async with gateway(tmp_path, "one", "two", models_start_timeout=0.3) as (http, servers):
        servers.slow.add("one")
        hung = [http.post(COMPLETIONS, json={**BODY, "model": "one"}) for _ in range(3)]
        waiting = [http.post(COMPLETIONS, json={**BODY, "model": "two"}) for _ in range(3)]
        answers = await asyncio.gather(*hung, *waiting)
        assert [answer.status_code for answer in answers] == [503] * 3 + [200] * 3
        assert "--models-start-timeout" in answers[0].json()["error"]["message"]
        assert int(answers[0].headers["retry-after"]) == 1
        assert servers.launched.count("one") == 1 and servers.stopped == ["one"]
        # Nor if whoever asked has left, and nobody else comes.
        await asyncio.sleep(0.3)
        leaving = asyncio.create_task(http.post(COMPLETIONS, json={**BODY, "model": "one"}))
        await until(lambda: servers.servers["one"].state == "loading")
        leaving.cancel()
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "two"})
        assert answer.status_code == 200 and servers.stopped == ["one"] * 2


@pytest.mark.parametrize(("most_asleep", "num_starts"), [(4, 3), (1, 6), (0, 6)])
async def test_who_sleeps_is_not_started_again(tmp_path: Path, most_asleep: int, num_starts: int):
    names = ("one", "two", "three")
    async with gateway(tmp_path, *names, models_asleep=most_asleep) as (http, servers):
        for name in names * 2:
            assert (await http.post(COMPLETIONS, json={**BODY, "model": name})).status_code == 200
        assert servers.most_awake == 1 and len(servers.launched) == num_starts
        assert len(servers.stopped) == num_starts - min(most_asleep + 1, 3)


async def test_a_model_that_never_goes_to_sleep_is_stopped(tmp_path: Path):
    async with gateway(tmp_path, "one", "two", models_start_timeout=0.3) as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200

        async def is_asleep(path: str) -> None:
            return None  # it answers with an error

        servers.servers["one"].is_asleep = is_asleep  # type: ignore[method-assign]
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "two"})
        assert answer.status_code == 200 and servers.stopped == ["one"]


async def test_the_folder_is_read_beside_what_is_served(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, servers):
        read, may_read = servers.models.read, threading.Event()
        servers.models.read = lambda: may_read.wait(WAIT_SECONDS) and read()  # type: ignore[method-assign]
        listing = asyncio.create_task(http.get("/v1/models"))
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "one"})
        assert answer.status_code == 200 and not listing.done()
        may_read.set()
        assert len((await listing).json()["data"]) == 1


async def test_unknown_names_share_a_look_into_the_folder(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, servers):
        read, scan, may_read = servers.models.read, servers.scan, threading.Event()
        scans: list[None] = []
        reads: list[bool] = []

        async def counted_scan() -> None:
            scans.append(None)
            await scan()

        def slow_read() -> dict[str, GatewayModel]:
            reads.append(may_read.wait(WAIT_SECONDS))
            return read()

        servers.scan = counted_scan  # type: ignore[method-assign]
        servers.models.read = slow_read  # type: ignore[method-assign]
        bodies = [{**BODY, "model": f"no{number}"} for number in range(30)]
        flood = [asyncio.create_task(http.post(COMPLETIONS, json=body)) for body in bodies]
        await until(lambda: len(scans) == 30)
        listing = asyncio.create_task(http.get("/v1/models"))
        await until(lambda: len(scans) == 31)
        make(tmp_path / "later")
        may_read.set()
        names = {card["id"] for card in (await listing).json()["data"]}
        assert {(await task).status_code for task in flood} == {404}
        assert names == {"one", "later"} and len(reads) == 2


def test_only_models_whose_files_have_changed_are_read_again(tmp_path: Path, monkeypatch, caplog):
    tiny = make_gguf(tmp_path / "tiny.gguf")
    parts = [tmp_path / f"parts-0000{number}-of-00002.gguf" for number in (1, 2)]
    parts[0].write_bytes(tiny)
    for name in ("one", "two", "broken"):
        make(tmp_path / name)
    (tmp_path / "broken" / "config.json").write_text("{")
    snapshot = tmp_path / "models--org--hub" / "snapshots" / "a"
    make(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a")
    read_spec = Mock(wraps=model_spec.read_spec)
    monkeypatch.setattr(model_spec, "read_spec", read_spec)
    folder = ModelFolder(tmp_path)

    def read() -> tuple[set[str], int]:
        read_spec.reset_mock()
        return {*folder.read()}, read_spec.call_count

    assert read() == ({"tiny", "one", "two"}, 4)
    assert read() == ({"tiny", "one", "two"}, 0)
    assert len(caplog.messages) == 2  # "broken", and a part is missing
    (tmp_path / "two" / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 99999}))
    (tmp_path / "broken" / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / "model.safetensors").write_bytes(bytes(8))
    parts[1].write_bytes(b"")
    assert read() == ({"tiny", "one", "two", "broken", "org/hub"}, 3)
    parts[1].write_bytes(tiny)
    shutil.rmtree(tmp_path / "one")
    assert read() == ({"tiny", "two", "broken", "org/hub"}, 0)
    assert read() == ({"tiny", "two", "broken", "org/hub"}, 0)


def test_a_model_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch, caplog):
    make(tmp_path / "one")
    folder = ModelFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(model_spec, "read_spec", Mock(side_effect=OSError("too many open files")))
        assert not folder.read() and not folder.read()
    assert len(caplog.messages) == 1
    assert {*folder.read()} == {"one"}


def test_a_folder_that_cannot_be_listed_hides_no_other_model(tmp_path: Path, monkeypatch):
    """From Python 3.13 on, `iterdir` itself raises."""
    for name in ("one", "two"):
        make(tmp_path / name)
    iterdir = Path.iterdir

    def iterdir_if_allowed(path: Path) -> Iterator[Path]:
        if path.name == "two":
            raise PermissionError("not readable")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", iterdir_if_allowed)
    folder = ModelFolder(tmp_path)
    assert {*folder.read()} == {*folder.read()} == {"one"}


@pytest.mark.parametrize("fails", [False, True])
async def test_a_look_that_does_not_end_is_shared_with_nobody(tmp_path: Path, fails: bool):
    async with gateway(tmp_path, "one") as (_, servers):
        read, may_read = servers.models.read, [threading.Event() for _ in range(3)]
        begun: list[threading.Event] = []

        def slow_read() -> dict[str, GatewayModel]:
            begun.append(may_read[len(begun)])
            begun[-1].wait(WAIT_SECONDS)
            if fails and len(begun) == 2:
                raise OSError("gone for a moment")
            return read()

        servers.models.read = slow_read  # type: ignore[method-assign]
        first, second, third = (asyncio.create_task(servers.scan()) for _ in range(3))
        await until(lambda: len(begun) == 1)
        make(tmp_path / "later")
        may_read[0].set()
        await until(lambda: len(begun) == 2)
        make(tmp_path / "last")
        if not fails:
            second.cancel()
        for event in may_read:
            event.set()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert {server.name for server in servers.there} == {"one", "later", "last"}


async def test_the_console_is_there_for_all_models(tmp_path: Path):
    browser = {"accept": "text/html"}
    for has_console in (True, False):
        options = {"api_key": ["secret"], "console": has_console}
        async with gateway(tmp_path, **options) as (http, servers):  # it needs no model, and no key
            page = await http.get("/", headers=browser)
            script = await http.get("/console/app.js")
        if has_console:
            assert "<!doctype html>" in page.text and script.status_code == 200
            assert page.headers["content-security-policy"] and "servd" not in servers.served
        else:
            assert page.json()["models"] == "/v1/models" and script.status_code in (401, 404)


async def test_who_looks_wakes_nothing_up(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, servers):
        body = {"model": "one"}
        assert (await http.get("/version", params=body)).status_code == 200
        assert len((await http.get("/openapi.json")).json()["paths"]) > 20
        answer = await http.get("/v1/cache", params=body)
        assert answer.status_code == 503 and "is stopped" in answer.json()["error"]["message"]
        for path in ("/favicon.ico", "/v1/nothing"):
            answer = await http.post(path, json=body)
            assert answer.status_code == 404 and "no route" in answer.json()["error"]["message"]
        answer = await http.delete("/v1/models")
        assert answer.status_code == 405 and "only" in answer.json()["error"]["message"]
        answer = await http.post("/sleep", params={**body, "level": "3"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "level"
        assert servers.served == {}
        # Who wants tokens gets them, from a server that sleeps, too.
        text = {"model": "one", "prompt": "abc"}
        assert (await http.post("/tokenize", json=text)).json()["count"] == 3
        assert (await http.post("/sleep", params=body)).json() == {"is_sleeping": True}
        assert (await http.post("/tokenize", json=text)).json()["count"] == 3
        assert (await http.get("/v1/cache", params=body)).status_code == 200
        answer = await http.post("/v1/responses/resp_1/cancel", params=body)
        assert answer.status_code == 404
        assert (await http.get("/is_sleeping", params=body)).json() == {"is_sleeping": True}


def keep_alive(text: Any) -> float | None:
    return seconds_of(msgspec.Raw(json.dumps(text).encode()))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (5, 5.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("100ms", 0.1),
        ("7", 7.0),
        (0, 0.0),
        (-1, None),
        ("-1m", None),
        (1e17, MAX_KEEP_ALIVE),
        (1e-5, 1e-5),
    ],
)
def test_keep_alive_is_ollamas(text: Any, seconds: Any):
    assert keep_alive(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        True,
        None,
        [5],
        "5 m",
        "1e9",
        {},
        float("inf"),
        "1" * 10_000 + "x",  # once a match for each way to cut it in parts was tried
    ],
)
def test_keep_alive_that_is_no_duration(text: Any):
    with pytest.raises(InvalidRequest, match="keep_alive"):
        keep_alive(text)


async def test_a_wrong_keep_alive_hides_no_model(tmp_path: Path):
    async with gateway(tmp_path, "one", "two") as (http, servers):
        content = b'{"model": "two", "prompt": "a", "keep_alive": ' + b"9" * 5000 + b"}"
        headers = {"content-type": "application/json"}
        answer = await http.post(COMPLETIONS, content=content, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "keep_alive"
        assert servers.launched == []


async def test_a_model_is_kept_as_long_as_its_last_request_says(tmp_path: Path):
    async with gateway(tmp_path, "one", sleep_idle_seconds=0.05) as (http, servers):
        servers.options = {"strict_fields": True}
        model = servers.servers["one"]

        async def ask(**fields: object) -> None:
            answer = await http.post(COMPLETIONS, json={**BODY, "model": "one", **fields})
            assert answer.status_code == 200, answer.text
            assert "x-servd-ignored" not in answer.headers

        await ask()
        await until(lambda: model.state == "asleep")
        await ask(keep_alive=-1)
        await asyncio.sleep(0.3)
        assert model.state == "awake"
        await ask(keep_alive=0)
        await until(lambda: model.state == "asleep")
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "one", "keep_alive": "soon"})
        assert answer.status_code == 400 and model.state == "asleep"


async def test_what_a_model_does_in_the_background_is_no_idleness(tmp_path: Path):
    async with gateway(tmp_path, "one", sleep_idle_seconds=0.05) as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        served, model = servers.served["one"], servers.servers["one"]
        served.engine.may_step.clear()
        body = {"model": "one", "input": "a", "background": True, "max_output_tokens": 20}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        await asyncio.sleep(0.3)
        assert model.state == "awake" and not model.is_leaving
        served.engine.may_step.set()
        await until(lambda: model.state == "asleep")


async def test_each_client_has_its_own_address_behind_the_front(tmp_path: Path):
    async with gateway(tmp_path, "one") as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        addresses = []
        llm = servers.served["one"].async_llm
        run_in_thread = llm.run_in_thread

        async def noted(owner: str, *args: Any, **options: Any) -> Any:
            addresses.append(owner)
            return await run_in_thread(owner, *args, **options)

        llm.run_in_thread = noted
        text = {"model": "one", "prompt": "abc" * 2000}  # too long for the event loop
        # As a proxy on this machine says, which uvicorn believes; not what a client adds to it.
        for header in ("192.0.2.1", "192.0.2.9, 192.0.2.2", None):
            headers = {"x-forwarded-for": header} if header else {}
            assert (await http.post("/tokenize", json=text, headers=headers)).status_code == 200
        assert [*dict.fromkeys(addresses)] == ["192.0.2.1", "192.0.2.2", "127.0.0.1"]


async def test_pages_of_allowed_origins_reach_the_models(tmp_path: Path):
    async with gateway(tmp_path, "one", allowed_origins=["https://a.example"]) as (http, _):
        for origin, status in (("https://b.example", 403), ("https://a.example", 200)):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            body = {**BODY, "model": "one"}
            answer = await http.post(COMPLETIONS, json=body, headers=headers)
            assert answer.status_code == status, answer.text


async def test_each_answer_has_one_line_in_the_access_log(tmp_path: Path, caplog):
    caplog.set_level("INFO", "servd.access")
    async with gateway(tmp_path, "one", access_log="requests") as (http, servers):
        servers.options = {"access_log": "requests"}
        http.headers["x-forwarded-for"] = "192.0.2.1"
        await http.post(COMPLETIONS, json={**BODY, "model": "one"})
        await http.post(COMPLETIONS, json={**BODY, "model": "no"})
        await http.get("/v1/models")
        lines = [line for line in caplog.messages if " client " in line and "wake_up" not in line]
        assert [(line.split()[:3], "client 192.0.2.1" in line) for line in lines] == [
            (["POST", COMPLETIONS, "200"], True),
            (["POST", COMPLETIONS, "404"], True),
            (["GET", "/v1/models", "200"], True),
        ]
        assert all("key -, client" in line for line in lines)


def adapter(folder: Path, base: str) -> Path:
    folder.mkdir(parents=True)
    config = {"base_model_name_or_path": base, "peft_type": "LORA", "r": 1}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def test_adapters_are_asked_for_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lora = tmp_path / "adapters"
    second = {"name": "second", "path": str(adapter(tmp_path / "second", "x"))}
    adapters = [
        f"first={adapter(tmp_path / 'first', '/home/me/two')}",
        json.dumps(second | {"base_model_name": "one"}),
        f"nobodys={adapter(tmp_path / 'nobodys', 'three')}",
    ]
    adapter(lora / "third", "org/two")
    models = tmp_path / "models"
    models.mkdir()
    options = {"enable_lora": True, "lora_modules": adapters, "lora_dir": str(lora)}
    async with gateway(models, "one", "two", **options) as (http, servers):
        assert [
            message for message in caplog.messages if "nobodys" in message and "three" in message
        ]
        listed = (await http.get("/v1/models")).json()["data"]
        parents = {card["id"]: card["parent"] for card in listed if card["parent"]}
        assert parents == {"first": "two", "second": "one", "third": "two"}
        assert (await http.get("/v1/models/first")).json()["parent"] == "two"
        for name, owner in (("first", "two"), ("third", "two"), ("second", "one")):
            await http.post(COMPLETIONS, json={**BODY, "model": name})
            assert servers.launched[-1] == owner
        unknown = await http.post(COMPLETIONS, json={**BODY, "model": "nobodys"})
        assert unknown.status_code == 404
        modules = [servers.options_of(name).lora.lora_modules for name in ("one", "two")]
        assert modules == [adapters[1:2], adapters[:1]]


async def test_adapters_that_a_server_was_told_of_are_found_there(tmp_path: Path):
    async with gateway(tmp_path, "one", "two", enable_lora=True) as (http, servers):
        for name in ("one", "two"):
            assert (await http.post(COMPLETIONS, json={**BODY, "model": name})).status_code == 200
        card = {"id": "told", "object": "model", "created": 1, "root": "x", "max_model_len": 1}
        models = json.dumps({"object": "list", "data": [{**card, "parent": "one"}]})

        async def ask(path: str) -> httpx.Response:
            return httpx.Response(200, text=models)

        servers.servers["one"].ask = ask
        assert (await http.get("/v1/models/told")).json()["parent"] == "one"
        assert await servers.find("told") is servers.servers["one"]


async def test_wrong_adapters_in_a_new_configuration_change_nothing(tmp_path: Path, caplog):
    async with gateway(tmp_path, "one", enable_lora=True) as (http, servers):
        options = {"models_dir": str(tmp_path), "enable_lora": True, "lora_modules": ["nonsense"]}
        keys = ApiKeys(servers.config.access)
        reload(lambda: Config.load(options), keys, None, servers)
        assert "NAME=FOLDER" in caplog.text
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200


def test_models_that_are_named_are_served_as_a_folder(tmp_path: Path):
    make(tmp_path / "a" / "one")
    make_gguf(tmp_path / "tiny.gguf")
    paths = [str(tmp_path / "a" / "one"), str(tmp_path / "tiny.gguf")]
    linked = link_models(Config.load({"models": paths}), tmp_path / "links")
    models = ModelFolder(Path(linked.models.models_dir or "")).read()
    assert [*models] == ["one", "tiny"]
    make(tmp_path / "b" / "one")
    twice = Config.load({"models": [paths[0], str(tmp_path / "b" / "one")]})
    with pytest.raises(ConfigError, match="two have the name one"):
        link_models(twice, tmp_path / "again")
    with pytest.raises(ConfigError, match="does not exist"):
        link_models(Config.load({"models": ["./no"]}), tmp_path / "none")
    with pytest.raises(ConfigError, match="give one of them"):
        check(Config.load({"models_dir": ".", "models": paths}))


def test_no_link_is_written_into_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path / "org")
    make(tmp_path / "hub")
    monkeypatch.setattr(hub, "download_weights", lambda name: tmp_path / "hub")
    config = Config.load({"models": [str(tmp_path / "org"), "org/model"]})
    before = sorted((tmp_path / "org").iterdir())
    with pytest.raises(ConfigError, match="org/model and org cannot both be served"):
        link_models(config, tmp_path / "links")
    assert sorted((tmp_path / "org").iterdir()) == before


def test_options_for_one_model_are_refused():
    for option in ({"headless": True}, {"batch_dir": "b"}):
        with pytest.raises(ConfigError, match="does not work with --models-dir"):
            check(Config.load({"models_dir": ".", **option}))
    with pytest.raises(ConfigError, match=r"MODEL \(gpt2\) and --models-dir: give one"):
        check(Config.load({"models_dir": ".", "model": "gpt2"}))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> Iterator[threading.Event]:
    """The hub of this process and its children has the model org/name."""
    with fake_hub.online(tiny_llama, monkeypatch) as opens:
        yield opens


@asynccontextmanager
async def ollama_client(
    folder: Path, **options: Any
) -> AsyncIterator[tuple[ollama.AsyncClient, Servers]]:
    """Ollama's client of a gateway with the model `one`."""
    async with gateway(folder, "one", **options) as (http, servers):
        async with ollama.AsyncClient(str(http.base_url)) as client:
            yield client, servers


@pytest.mark.usefixtures("online")
async def test_a_client_downloads_a_model_and_uses_it(tmp_path: Path):
    async with ollama_client(tmp_path, models_pull=True) as (client, servers):
        lines = [line async for line in await client.pull("org/name", stream=True)]
        assert lines[0].status == "pulling manifest" and lines[-1].status == "success"
        [total] = {line.total for line in lines if line.total}
        assert all(0 <= (line.completed or 0) <= total for line in lines)
        listed = {model.model: model.details for model in (await client.list()).models}
        details = await client.show("org/name")  # by its files: it does not run
        assert details.details and details.details.parameter_size
        assert listed["org/name:latest"].parameter_size == details.details.parameter_size
        assert (details.modelinfo or {})["llama.block_count"] == 2 and details.template
        assert servers.served == {}
        assert (await client.generate("org/name", "hi", options={"num_predict": 3})).response
        with pytest.raises(ollama.ResponseError, match="org/other"):
            await client.pull("org/other")
        with pytest.raises(ollama.ResponseError, match="does not exist"):
            await client.pull("../../etc")
        assert (await client.pull("one")).status == "success"


async def test_every_line_of_a_download_is_one_for_everybody(tmp_path: Path, monkeypatch):
    async def pull(model: str, folder: Path) -> AsyncIterator[dict[str, str]]:
        yield {"status": f"pulling {model}"}
        yield {"status": f"still pulling {model}"}
        raise ModelNotFound(f"there is no {model}")

    monkeypatch.setattr("servd.gateway.proxy.pull", pull)
    async with gateway(tmp_path, models_pull=True) as (http, _):
        answer = await http.post("/api/pull", json={"model": "org/a\u2028b\u0085c"})
    status, more, error = map(json.loads, answer.text.splitlines())
    for text in (status["status"], more["status"], error["error"]):
        assert "a\u2028b\u0085c" in text


async def test_a_tag_means_the_same_file_as_on_the_hub(tmp_path: Path, monkeypatch):
    files = tmp_path / "files"
    files.mkdir()
    for number, kind in enumerate(("Q6_K", "Q6_K_L", "Q4_K_M")):
        path = files / f"m-{kind}.gguf"
        path.write_bytes(make_gguf(path) + bytes(number))
    cache = tmp_path / "models"
    cache.mkdir()
    with fake_hub.online(files, monkeypatch):
        async with ollama_client(cache, models_pull=True) as (client, _):

            async def pull(tag: str) -> set[str]:
                assert (await client.pull(f"org/name:{tag}")).status == "success"
                return {
                    (model.model or "").partition(":")[2] for model in (await client.list()).models
                }

            assert await pull("q6_k_l") == {"Q6_K_L", "latest"}
            assert await pull("q6_k_l") == {"Q6_K_L", "latest"}
            assert await pull("q6_k") == {"Q6_K", "Q6_K_L", "latest"}
            assert await pull("Q4_K") == {"Q6_K", "Q6_K_L", "Q4_K_M", "latest"}


async def test_a_client_downloads_one_gguf_file_of_several(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import LlamaForCausalLM

    files = tmp_path / "files"
    files.mkdir()
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    vocabulary = gguf_files.bpe_vocabulary(tiny_llama / "tokenizer.json")
    gguf_files.write_model(files / "m-F32.gguf", model, vocabulary=vocabulary, split=8)
    (files / "m-Q8_0.gguf").write_bytes(bytes(100))
    cache = tmp_path / "models"
    cache.mkdir()
    with fake_hub.online(files, monkeypatch):
        async with ollama_client(cache, models_pull=True) as (client, _):
            assert (await client.pull("org/name:F32")).status == "success"
            listed = {model.model: model.details for model in (await client.list()).models}
            assert listed["org/name:F32"] and listed["org/name:F32"].format == "gguf"
            details = (await client.show("org/name:F32")).details
            assert details and details.format == "gguf"
            answer = await client.generate("org/name:F32", "hi", options={"num_predict": 3})
            assert answer.response
            with pytest.raises(ollama.ResponseError, match="org/name has m-F32-00001-of"):
                await client.pull("org/name:Q4_K_M")
    assert not [*cache.rglob("*Q8_0*")]


@pytest.mark.usefixtures("online")
async def test_a_download_that_was_cut_off_is_resumed(tmp_path: Path):
    """As huggingface_hub leaves it: the branch, its config, and no weights yet."""
    async with ollama_client(tmp_path, models_pull=True) as (client, _):
        await client.pull("org/name")
        [weights] = tmp_path.glob("models--org--name/snapshots/*/model.safetensors")
        weights.unlink()
        assert "org/name:latest" not in [model.model for model in (await client.list()).models]
        assert (await client.pull("org/name")).status == "success"
        assert weights.exists()


async def test_a_client_that_leaves_ends_its_download(tmp_path: Path, online: threading.Event):
    online.clear()
    async with ollama_client(tmp_path, models_pull=True) as (client, _):
        progress = await client.pull("org/name", stream=True)
        statuses = [(await anext(progress)).status for _ in range(3)]
        assert statuses[-1] == "pulling org/name"
        with pytest.raises(ollama.ResponseError, match="another download is running"):
            await client.pull("org/name")
        [download] = [
            process
            for process in psutil.process_iter(["ppid", "cmdline"])
            if process.info["ppid"] == os.getpid() and "pull" in (process.info["cmdline"] or ())
        ]
        await progress.aclose()
        await until(lambda: not download.is_running())
        online.set()
        assert (await client.pull("org/name")).status == "success"


@pytest.mark.usefixtures("online")
async def test_another_site_cannot_start_a_download(tmp_path: Path):
    """A browser sends text/plain without asking."""
    async with gateway(tmp_path, "one", models_pull=True) as (http, _):
        for path, body in (("pull", '{"model": "org/name"}'), ("chat", '{"keep_alive": 0}')):
            headers = {"content-type": "text/plain"}
            answer = await http.post(f"/api/{path}", content=body, headers=headers)
            assert answer.status_code == 400 and "Content-Type" in answer.text
    assert not [*tmp_path.glob("models--*")]


async def test_no_hub_is_no_fault_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    async with ollama_client(tmp_path, models_pull=True) as (client, _):
        with pytest.raises(ollama.ResponseError, match="cannot get 'org/name'"):
            await client.pull("org/name")


@pytest.mark.usefixtures("online")
async def test_only_models_pull_lets_clients_download(tmp_path: Path):
    async with ollama_client(tmp_path) as (client, _):
        with pytest.raises(ollama.ResponseError, match="is not served here") as error:
            await client.pull("org/name")
        assert error.value.status_code == 404


@pytest.mark.usefixtures("online")
async def test_a_download_that_the_disk_cannot_hold_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "of-another-file").open("wb") as file:
        file.truncate(1 << 30)
    async with ollama_client(tmp_path, models_pull=True) as (client, _):
        with pytest.raises(ollama.ResponseError, match="needs .*1000B free") as error:
            await client.pull("org/name")
        assert error.value.status_code == 400
    assert [file.name for file in blobs.iterdir()] == ["of-another-file"]


async def test_keep_alive_of_nothing_frees_a_model_without_loading_it(tmp_path: Path):
    async with ollama_client(tmp_path) as (client, servers):
        assert (await client.generate("one", keep_alive=0)).done_reason == "unload"
        assert servers.served == {}
        assert (await client.generate("one", "hi", options={"num_predict": 3})).response
        assert [model.model for model in (await client.ps()).models] == ["one:latest"]
        assert (await client.chat("one", [], keep_alive="0s")).done_reason == "unload"
        assert (await client.ps()).models == []


async def test_no_writing_of_a_path_passes_the_scopes_of_the_gateway(tmp_path: Path):
    keys = tmp_path / "keys.toml"
    secret = "k" * 43
    keys.write_text(f'[[keys]]\nname = "a"\nsha256 = "{hash_key(secret.encode())}"\n')
    async with gateway(tmp_path / "models", "one", api_key_file=str(keys)) as (http, servers):
        http.headers["x-api-key"] = secret
        for suffix in ("", "%0A", "%0D%0A", "%00", "/"):
            for method, path in (("POST", "/sleep"), ("GET", "/metrics"), ("POST", "/wake_up")):
                answer = await http.request(method, f"{path}{suffix}?model=one")
                assert answer.status_code == (404 if suffix else 403), (path, suffix)
        assert servers.launched == []


@pytest.mark.parametrize("body", [{"model": 5}, {"model": ["a"]}, {"name": {}}, {"model": True}])
@pytest.mark.parametrize("path", ["/api/pull", "/api/show", "/sleep"])
async def test_a_model_of_a_wrong_type_is_not_the_last_one(tmp_path: Path, path, body):
    async with gateway(tmp_path, "one") as (http, _):
        answer = await http.post(path, json={**body, "stream": False})
        assert answer.status_code == 400, answer.text
