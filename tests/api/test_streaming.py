"""Server-sent events over a socket: framing, keep-alive, errors in mid-stream, leaving."""

import asyncio

import httpx
import pytest
from starlette.requests import ClientDisconnect

from servd.api.connection import while_connected
from servd.base.errors import ShuttingDown
from servd.messages.engine import AbortRequests, EngineGone
from tests.api.harness import Served, events, output_text, serve, until
from tests.limits import WAIT_SECONDS

COMPLETIONS = "/v1/completions"


def aborted(served: Served) -> list[str]:
    aborts = [message for message in served.engine.sent if isinstance(message, AbortRequests)]
    return [request_id for abort in aborts for request_id in abort.request_ids]


async def test_headers_and_frames(listening_server: Served):
    answer = await listening_server.http.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["transfer-encoding"] == "chunked"
    text = "".join(chunk["choices"][0]["text"] for chunk in events(answer.text))
    assert text == output_text("a", 16)


async def test_text_arrives_as_it_is_made(listening_server: Served):
    served = listening_server
    served.engine.step_seconds = 0.01
    body = {"prompt": "a", "max_tokens": 100, "stream": True}
    async with served.http.stream("POST", COMPLETIONS, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                assert served.async_llm.num_unfinished == 1  # the engine is not done yet
                break
    await until(lambda: served.async_llm.num_unfinished == 0)


async def test_comments_keep_an_idle_stream_alive():
    async with serve(listen=True, keep_alive=0.03) as served:
        served.engine.may_step.clear()
        body = {"prompt": "a", "stream": True, "max_tokens": 4}
        lines: list[str] = []
        async with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 3:
                    served.engine.may_step.set()
        assert lines[:2] == [": keep-alive", ""]
        assert sum("text_completion" in line for line in lines) >= 1 and "data: [DONE]" in lines
        assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_no_comment_while_text_flows():
    async with serve(listen=True, keep_alive=0.2) as served:
        served.engine.step_seconds = 0.02
        body = {"prompt": "a", "stream": True, "max_tokens": 30}
        answer = await served.http.post(COMPLETIONS, json=body)
        assert ": keep-alive" not in answer.text


@pytest.mark.parametrize("keep_alive", [15.0, 0.01])
async def test_an_engine_that_dies_in_mid_stream(keep_alive):
    async with serve(listen=True, keep_alive=keep_alive) as served:
        served.engine.step_seconds = 0.02
        body = {"prompt": "a", "stream": True, "max_tokens": 1000}
        text = ""
        async with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            async for part in answer.aiter_text():
                text += part
                if "data: " in text and not isinstance(served.async_llm.status, EngineGone):
                    served.engine.may_step.clear()
                    served.engine.tell(EngineGone("out of memory"))
        chunks = events(text)
        assert chunks[0]["choices"] and chunks[-1]["error"]["code"] == "engine_dead"
        assert "out of memory" in chunks[-1]["error"]["message"]


async def test_a_stream_that_a_shutdown_cuts_says_so(listening_server: Served):
    listening_server.engine.step_seconds = 0.02
    body = {"prompt": "a", "stream": True, "max_tokens": 1000}
    text = ""
    async with listening_server.http.stream("POST", COMPLETIONS, json=body) as answer:
        async for part in answer.aiter_text():
            text += part
            listening_server.async_llm.fail(ShuttingDown("the server is shutting down"))
    assert events(text)[-1]["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_aborts_its_requests(listening_server, stream, has_begun):
    served = listening_server
    served.engine.step_seconds = 0.01
    if not has_begun:
        served.engine.may_step.clear()
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3000, "stream": stream}

    async def read() -> None:
        async with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass

    client = asyncio.create_task(read())
    await until(lambda: served.async_llm.num_unfinished == 2)
    if has_begun:
        await until(lambda: served.async_llm.engines[0].stats.num_running == 4)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    await until(lambda: served.async_llm.num_unfinished == 0)
    await until(lambda: len(set(aborted(served))) == 4)  # the loop may end each prompt in a turn
    served.engine.may_step.set()
    await until(lambda: not served.engine.core.has_work)
    await until(lambda: not served.async_llm.requests)


async def test_a_client_that_stops_reading_and_disconnects(listening_server: Served):
    served = listening_server
    body = {"prompt": "a", "n": 100, "max_tokens": 3000, "stream": True}
    async with served.http.stream("POST", COMPLETIONS, json=body) as answer:
        await anext(answer.aiter_bytes())
        await asyncio.sleep(0.5)  # buffers fill, the server's writes block
    await until(lambda: served.async_llm.num_unfinished == 0)


async def test_many_clients_at_once_get_their_own_text(listening_server: Served):
    async def ask(i: int) -> None:
        body = {"prompt": f"client {i}", "max_tokens": 20, "stream": i % 2 == 0}
        answer = await http.post(COMPLETIONS, json=body)
        chunks = events(answer.text) if i % 2 == 0 else [answer.json()]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == output_text(f"client {i}", 20)

    async with httpx.AsyncClient(base_url=listening_server.url, timeout=WAIT_SECONDS) as http:
        await asyncio.gather(*(ask(i) for i in range(32)))


async def test_a_block_whose_client_leaves_is_cancelled_and_ends():
    ended: list[str] = []

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        async with while_connected(receive):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                ended.append("work")
    assert ended == ["work"]


async def test_a_block_whose_client_stays_ends_as_it_does():
    async def never() -> dict[str, str]:
        await asyncio.sleep(60)
        return {}

    with pytest.raises(ZeroDivisionError):
        async with while_connected(never):
            await asyncio.sleep(0)
            raise ZeroDivisionError
    current = asyncio.current_task()
    with pytest.raises(asyncio.CancelledError):  # by somebody else than the client
        async with while_connected(never):
            assert current is not None
            current.cancel()
            await asyncio.sleep(60)
    assert current is not None
    current.uncancel()
