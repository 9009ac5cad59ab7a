"""--response-db: nothing that a client got is lost, whatever is killed; real processes.

`SERVD_KILLS=200 pytest -m slow tests/integration/test_response_db.py` kills 200 times.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.api.harness import named_events
from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

KILLS = int(os.environ.get("SERVD_KILLS", "20"))
NUM_CLIENTS = 6
OPTIONS = ("--executor", "fake", "--api-server-count", "2", "--max-engine-restarts", "100000")
URL = "/v1/responses"


def api_servers(server: Server) -> set[int]:
    """The process ids of the API servers that run."""
    pids: set[int] = set()
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # also: a zombie
            if "api.server" in " ".join(child.cmdline()):
                pids.add(child.pid)
    return pids


async def kill_api_server(server: Server) -> None:
    """Kill one, and wait for its successor."""
    victim = random.choice([*api_servers(server)])
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(api_servers(server) - {victim}) == 2)


class Client:
    """Sends requests of all kinds, and remembers what the server has acknowledged."""

    def __init__(self, url: Callable[[], str], number: int) -> None:
        self.url = url
        self.random = random.Random(number)
        self.responses: dict[str, Any] = {}  # complete, by id
        self.background: set[str] = set()  # ids
        self.previous: str | None = None
        self.chain: list[str] = []  # texts of the inputs up to `previous`
        self.conversations: dict[str, list[tuple[str, str]]] = {}  # inputs and outputs
        self.num_failed = 0

    async def run(self) -> None:
        while True:
            try:
                async with httpx.AsyncClient(base_url=self.url(), timeout=WAIT_SECONDS) as http:
                    while True:
                        await self.send(http)
            except (httpx.HTTPError, AssertionError):  # its server was killed
                self.num_failed += 1
                await asyncio.sleep(0.05)

    async def post(self, http: httpx.AsyncClient, path: str, **body: Any) -> Any:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def send(self, http: httpx.AsyncClient) -> None:
        text = f"question {self.random.getrandbits(40)}"
        body = {"input": text, "max_output_tokens": 4}
        match self.random.choice(["plain", "stream", "chain", "conversation", "background"]):
            case "plain":
                self.keep(await self.post(http, URL, **body))
            case "stream":
                answer = await http.post(URL, json={**body, "stream": True})
                assert answer.status_code == 200
                last = named_events(answer.text)[-1]
                assert last["type"] == "response.incomplete"
                self.keep(last["response"])
            case "chain":
                response = await self.post(http, URL, **body, previous_response_id=self.previous)
                self.keep(response)
                self.previous = response["id"]
                self.chain.append(text)
                if len(self.chain) > 40:
                    self.previous = None
                    self.chain = []
            case "conversation":
                if not self.conversations or self.random.random() < 0.1:
                    made = await self.post(http, "/v1/conversations")
                    self.conversations[made["id"]] = []
                name = self.random.choice([*self.conversations][-2:])
                response = await self.post(http, URL, **body, conversation=name)
                self.keep(response)
                self.conversations[name].append((text, text_of(response["output"][0])))
            case "background":
                response = await self.post(http, URL, **body, background=True)
                self.background.add(response["id"])

    def keep(self, response: dict[str, Any]) -> None:
        assert response["status"] == "incomplete", response
        self.responses[response["id"]] = response

    async def check(self, http: httpx.AsyncClient) -> None:
        """Everything acknowledged is there, and no background response runs for ever."""
        for name, response in self.responses.items():
            answer = await http.get(f"{URL}/{name}")
            assert answer.status_code == 200 and answer.json() == response, answer.text
        if self.previous is not None:
            texts = await self.texts(http, f"{URL}/{self.previous}/input_items")
            assert texts[::2] == self.chain
        for name, pairs in self.conversations.items():
            texts = await self.texts(http, f"/v1/conversations/{name}/items")
            stored = [*zip(texts[::2], texts[1::2], strict=True)]
            assert set(pairs) <= set(stored)
        for name in self.background:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    answer = await http.get(f"{URL}/{name}")
                    assert answer.status_code == 200, answer.text
                    if answer.json()["status"] in ("incomplete", "failed"):
                        break
                    await asyncio.sleep(0.05)

    async def texts(self, http: httpx.AsyncClient, path: str) -> list[str]:
        """The texts of all items of a list."""
        texts: list[str] = []
        after = ""
        while True:
            page = (await http.get(f"{path}?order=asc&limit=100&after={after}")).json()
            texts += map(text_of, page["data"])
            after = page["last_id"]
            if not page["has_more"]:
                return texts


def text_of(item: dict[str, Any]) -> str:
    return item["content"][0]["text"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.05)


async def answer_more(clients: list[Client]) -> None:
    """Wait for some complete responses."""

    def count() -> int:
        return sum(len(client.responses) for client in clients)

    last = count() + 20
    await until(lambda: count() > last)


def test_a_file_that_is_no_database_ends_the_start(start, tmp_path: Path):
    path = tmp_path / "text"
    path.write_text("no database " * 1000)
    server = start("--executor", "fake", "--response-db", str(path), wait=False)
    assert server.process.wait(WAIT_SECONDS) == 2
    server.wait_for_line(f"--response-db {path}: file is not a database")


@pytest.mark.slow
@pytest.mark.timeout(60 + 15 * KILLS)
async def test_nothing_acknowledged_is_lost(start, tmp_path: Path):
    options = (*OPTIONS, "--response-db", str(tmp_path / "responses.db"))

    def start_server() -> Server:
        return start(*options, new_session=True)

    server = await asyncio.to_thread(start_server)
    clients = [Client(lambda: server.url, number) for number in range(NUM_CLIENTS)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    for number in range(KILLS):
        await answer_more(clients)
        if number % 10 in (4, 9):
            if number % 10 == 4:
                os.killpg(server.process.pid, signal.SIGKILL)
            await asyncio.to_thread(server.stop)
            server = await asyncio.to_thread(start_server)
        else:
            await kill_api_server(server)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(client.num_failed for client in clients) > 0
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_SECONDS) as http:
        await asyncio.gather(*(client.check(http) for client in clients))
    print(sum(len(client.responses) for client in clients), "responses")
