"""Several models behind one port. Their servers run in this process here; as processes they do in
tests/integration/test_several_models.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from servd import log
from servd.api.auth import Keys
from servd.api.front import check, create_front
from servd.api.model_servers import ModelServer, ModelServers
from servd.config import Config
from servd.errors import ConfigError
from tests.api.harness import Served, events, listening, serve, until

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257,
    "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}


class Servers(ModelServers):
    """Their servers share this event loop; those of `broken` cannot be started, and those of `slow`
    are ready when the test says so.
    """

    def __init__(self, config: Config, stack: AsyncExitStack) -> None:
        super().__init__(config, "")
        self.stack = stack
        self.served: dict[str, Served] = {}
        self.broken: set[str] = set()
        self.slow: set[str] = set()
        self.launched: list[str] = []
        self.most_awake = 0

    async def _launch(self, server: ModelServer) -> None:
        self.launched.append(server.name)
        ends_with = 1 if server.name in self.broken else None
        server.child = SimpleNamespace(exit_code=ends_with, stop=lambda timeout: None)  # type: ignore[assignment]
        keys = self._config_of(server, "").access.api_key
        served = await self.stack.enter_async_context(
            serve(
                listen=True,
                is_ready=server.name not in self.broken | self.slow,
                served_model_name=[server.name],
                api_key=keys,
            )
        )
        self.served[server.name], server.http = served, served.http

    async def _wake_up(self, server: ModelServer) -> None:
        await super()._wake_up(server)
        awake = [each for each in self.servers.values() if each.runs and each.is_awake]
        self.most_awake = max(self.most_awake, len(awake))

    async def _stop(self, server: ModelServer) -> None:
        server.is_awake, server.child = False, None


@asynccontextmanager
async def front(
    folder: Path, *names: str, **options: object
) -> AsyncIterator[tuple[httpx.AsyncClient, Servers]]:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIG))
    config = Config.load({"models_dir": str(folder), **options})
    async with AsyncExitStack() as stack:
        servers = Servers(config, stack)
        url = await stack.enter_async_context(
            listening(create_front(config, servers, Keys(config.access)))
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        yield http, servers


async def test_each_request_goes_to_the_model_it_names(tmp_path):
    async with front(tmp_path, "one", "two", models_max=2) as (http, servers):
        assert (await http.get("/health")).status_code == 200 and servers.served == {}
        for name in ("one", "two", "one"):
            answer = await http.post(COMPLETIONS, json={**BODY, "model": name})
            assert answer.status_code == 200 and answer.json()["model"] == name
            assert answer.headers["x-request-id"] in answer.json()["id"]
        streamed = await http.post(COMPLETIONS, json={**BODY, "model": "two", "stream": True})
        assert {each["model"] for each in events(streamed.text) if each != "[DONE]"} == {"two"}
        # Without a name it is the one that was used last.
        assert (await http.post(COMPLETIONS, json=BODY)).json()["model"] == "two"
        assert (await http.get("/version", params={"model": "one"})).status_code == 200
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["state"]) for card in listed] == [
            ("one", "awake"), ("two", "awake"),
        ]  # fmt: skip
        card = (await http.get("/v1/models/two")).json()
        assert card["max_model_len"] == 4096 and card["permission"] == []
        assert card["created"] == int((tmp_path / "two" / "config.json").stat().st_mtime)
        lines = (await http.get("/metrics")).text.splitlines()
        counted = [line for line in lines if line.startswith("vllm:request_success_total{")]
        assert sorted(line.split()[-1] for line in counted if '"length"' in line) == ["2.0", "3.0"]
        assert lines.count("# TYPE vllm:request_success_total counter") == 1


async def test_what_no_model_can_answer_starts_none(tmp_path):
    async with front(tmp_path, "one", api_key=["secret"]) as (http, servers):
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


async def test_models_take_turns_and_no_request_is_refused(tmp_path):
    async with front(tmp_path, "one", "three", "two") as (http, servers):

        async def ask(i: int) -> str:
            name = ("one", "two", "three")[i % 3]
            answer = await http.post(COMPLETIONS, json={**BODY, "model": name})
            assert answer.status_code == 200, answer.text
            return answer.json()["model"]

        names = await asyncio.gather(*(ask(i) for i in range(30)))
        assert names == ["one", "two", "three"] * 10 and servers.most_awake == 1


async def test_a_model_that_is_never_idle_makes_room_in_time(tmp_path):
    async with front(tmp_path, "one", "two") as (http, servers):
        is_over = asyncio.Event()

        async def keep_busy() -> None:
            while not is_over.is_set():
                body = {**BODY, "model": "one", "max_tokens": 50}
                assert (await http.post(COMPLETIONS, json=body)).status_code == 200

        busy = [asyncio.create_task(keep_busy()) for _ in range(4)]
        await until(lambda: servers.served)
        for _ in range(3):
            answer = await http.post(COMPLETIONS, json={**BODY, "model": "two"})
            assert answer.status_code == 200
        is_over.set()
        await asyncio.gather(*busy)


async def test_an_answer_that_is_not_read_holds_up_no_other_model(tmp_path):
    async with front(tmp_path, "one", "two") as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        served = servers.served["one"]  # of which sleep does not wait for its engine
        served.engine.step_seconds = 0.05
        long = {**BODY, "model": "one", "max_tokens": 4000, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=long) as slow:
            lines = slow.aiter_lines()  # held, as its end would close the stream
            await anext(lines)
            answer = await http.post(COMPLETIONS, json={**BODY, "model": "two"})
            assert answer.status_code == 200 and servers.servers["one"].num_open == 1


async def test_the_wait_for_a_model_is_part_of_the_account(tmp_path, monkeypatch):
    monkeypatch.setenv(log.MODEL, "one")  # as its processes have it
    async with front(tmp_path, "one") as (http, servers):
        servers.slow.add("one")
        forged = {"x-servd-since": "1"}
        task = asyncio.create_task(
            http.post(COMPLETIONS, json={**BODY, "model": "one"}, headers=forged)
        )
        await until(lambda: "one" in servers.served)
        await asyncio.sleep(0.5)
        engine = servers.served["one"].engine
        engine.tell(engine.ready)
        own = (await task).json()["id"]
        timeline = (await http.get(f"/v1/requests/{own}/timeline")).json()
        assert timeline["cause"] == "model_load" and 500 < timeline["wall_ms"] < 60_000
        assert sum(cause["ms"] for cause in timeline["causes"]) == pytest.approx(
            timeline["wall_ms"], abs=0.1
        )


async def test_a_server_with_one_model_believes_no_client_when_its_request_began(http):
    forged = {"x-servd-since": "1"}
    own = (await http.post(COMPLETIONS, json=BODY, headers=forged)).json()["id"]
    timeline = (await http.get(f"/v1/requests/{own}/timeline")).json()
    assert timeline["wall_ms"] < 60_000


async def test_a_client_that_leaves_ends_its_request(tmp_path):
    async with front(tmp_path, "one") as (http, servers):
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        served = servers.served["one"]
        served.engine.step_seconds = 0.05
        body = {**BODY, "model": "one", "max_tokens": 4000, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: not served.async_llm.num_unfinished)
        assert servers.servers["one"].num_open == 0


async def test_a_model_that_cannot_be_started(tmp_path):
    async with front(tmp_path, "one", "two") as (http, servers):
        servers.broken.add("one")
        for _ in range(2):
            answer = await http.post(COMPLETIONS, json={**BODY, "model": "one"})
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert "could not be started" in answer.json()["error"]["message"]
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "two"})
        assert answer.status_code == 200


async def test_sleep_is_shown_and_asking_for_it_loads_nothing(tmp_path):
    key = {"authorization": "Bearer secret"}
    async with front(tmp_path, "one", "two", models_max=2, api_key=["secret"]) as (http, servers):
        http.headers.update(key)

        async def states() -> list[str]:
            return [card["state"] for card in (await http.get("/v1/models")).json()["data"]]

        one = {"model": "one"}
        assert (await http.get("/is_sleeping", params=one)).json() == {"is_sleeping": True}
        assert (await http.post("/sleep", params=one)).json() == {"is_sleeping": True}
        assert servers.served == {}
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        assert (await http.get("/is_sleeping", params=one)).json() == {"is_sleeping": False}
        assert (await http.post("/sleep", params=one)).json() == {"is_sleeping": True}
        assert await states() == ["asleep", "stopped"]
        assert (await http.post("/wake_up", params=one)).json() == {"is_sleeping": False}
        assert await states() == ["awake", "stopped"]
        # By itself, as with --sleep-idle-seconds.
        assert (await servers.served["one"].http.post("/sleep", headers=key)).status_code == 200
        assert await states() == ["asleep", "stopped"]
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        assert await states() == ["awake", "stopped"]
        # Scrapers may send their key in either header.
        del http.headers["authorization"]
        text = (await http.get("/metrics", headers={"x-api-key": "secret"})).text
        assert "vllm:engine_sleep_state{" in text


async def test_the_folder_is_read_again(tmp_path):
    async with front(tmp_path, "one") as (http, _):
        (tmp_path / "later").mkdir()
        (tmp_path / "later" / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "no model").mkdir()
        answer = await http.post(COMPLETIONS, json={**BODY, "model": "later"})
        assert answer.json()["model"] == "later"
        assert len((await http.get("/v1/models")).json()["data"]) == 2


async def test_a_client_that_leaves_while_its_model_starts(tmp_path):
    async with front(tmp_path, "one") as (http, servers):
        servers.slow.add("one")
        body = {**BODY, "model": "one"}
        first = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await until(lambda: servers.served)
        first.cancel()
        await until(lambda: not servers._switch.locked())
        second = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await until(servers._switch.locked)  # it waits, too, and is not refused
        servers.served["one"].engine.revive()
        assert (await second).status_code == 200 and servers.launched == ["one"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/%2e%2e/version", 404), ("/x/../version", 404), ("//model/version", 404),
        ("/version%3Fx", 404), ("/version?x=%00", 200), ("/%00", 404), ("/v1/files", 404),
    ],
)  # fmt: skip
async def test_paths_are_passed_on_as_they_came(tmp_path, path, status):
    async with front(tmp_path, "one") as (http, _):
        answer = await http.get("/", extensions={"target": path.encode()})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "body",
    [b'{"a":' * 100_000, b'{"model": "one", "a":' + b"[" * 100_000, b'{"model": 5}', b"\xff"],
)
async def test_what_is_no_request_is_not_the_servers_fault(tmp_path, body):
    async with front(tmp_path, "one") as (http, _):
        headers = {"content-type": "application/json"}
        answer = await http.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 400, answer.text


async def test_a_folder_that_cannot_be_served_is_left_out(tmp_path):
    async with front(tmp_path, "one") as (http, _):
        for name in (b"dangling", b"\xff"):
            folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "dangling" / "model.safetensors").symlink_to("nowhere")
        listed = await http.get("/v1/models")
        assert [card["id"] for card in listed.json()["data"]] == ["one"]


async def test_metrics_with_either_header_of_a_key(tmp_path):
    async with front(tmp_path, "one", api_key=["secret"]) as (http, _):
        http.headers["x-api-key"] = "secret"
        assert (await http.post(COMPLETIONS, json={**BODY, "model": "one"})).status_code == 200
        assert "vllm:request_success_total{" in (await http.get("/metrics")).text


def test_options_for_one_model_are_refused():
    for option in ({"model": "gpt2"}, {"headless": True}, {"batch_dir": "b"}):
        with pytest.raises(ConfigError, match="is for one model"):
            check(Config.load({"models_dir": ".", **option}))
