"""`return_progress`: streams say how much of a prompt is computed."""

from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest

from tests.api.harness import MODEL, Served, events, named_events, serve, user

TEXT = "x" * 200
HI: Any = user(TEXT)
CHAT = "/v1/chat/completions"
CASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    "/v1/completions": {"prompt": TEXT},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": HI},
}


async def chunks_of(served: Served, route: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 4} if route != "/v1/responses" else {"max_output_tokens": 4}
    body |= CASES[route] | {"stream": True, **fields}
    response = await served.http.post(route, json=body)
    assert response.status_code == 200, response.text
    assert "x-servd-ignored" not in response.headers
    is_named = route in ("/v1/responses", "/v1/messages")
    return named_events(response.text) if is_named else events(response.text)


def progress_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]


@pytest.mark.parametrize("route", CASES)
async def test_a_stream_reports_each_part_of_the_prompt(route: str):
    async with serve(max_num_batched_tokens=64) as served:
        served.engine.step_seconds = 0.01
        chunks = await chunks_of(served, route, return_progress=True)
        reports = progress_of(chunks)
        total = reports[0]["total"]
        assert total >= len(TEXT) and len(reports) >= total // 64
        assert all(report["total"] == total and report["cache"] == 0 for report in reports)
        assert all(a["processed"] < b["processed"] for a, b in pairwise(reports))
        assert all(a["time_ms"] <= b["time_ms"] for a, b in pairwise(reports))
        assert reports[0]["processed"] == 64 and reports[-1]["processed"] == total
        [cached, *_] = progress_of(await chunks_of(served, route, return_progress=True))
        assert cached["cache"] >= total - 32 and cached["processed"] == total
        assert not progress_of(await chunks_of(served, route))
        plain = [chunk for chunk in chunks if "prompt_progress" not in chunk]
        assert len(plain) == len(await chunks_of(served, route))


async def test_progress_of_several_prompts_is_one():
    async with serve(max_num_batched_tokens=64) as served:
        prompts = ["a" * 100, "b" * 100]
        fields = {"prompt": prompts, "return_progress": True, "n": 2}
        reports = progress_of(await chunks_of(served, "/v1/completions", **fields))
        assert {report["total"] for report in reports} == {200}
        assert reports[-1]["processed"] == 200
        assert all(a["processed"] <= b["processed"] for a, b in pairwise(reports))


async def test_the_sdks_read_streams_with_progress():
    async with serve(listen=True, max_num_batched_tokens=64) as served:
        served.engine.step_seconds = 0.01
        extra: Any = {"return_progress": True}
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            async with client.responses.stream(
                model=MODEL, input=TEXT, max_output_tokens=4, extra_body=extra
            ) as stream:
                kinds = [event.type async for event in stream]
            assert kinds.count("response.prompt_progress") >= 3
            assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
            chunks = await client.chat.completions.create(
                model=MODEL, messages=HI, stream=True, max_tokens=4, extra_body=extra
            )
            texts = [chunk.choices[0].delta.content async for chunk in chunks if chunk.choices]
            assert "".join(text or "" for text in texts)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="any") as client:
            async with client.messages.stream(
                model=MODEL, messages=HI, max_tokens=4, extra_body=extra
            ) as stream:
                message = await stream.get_final_message()
            assert message.content[0].type == "text"


@pytest.mark.parametrize("fields", [{}, {"stream": True, "use_beam_search": True}])
async def test_without_a_stream_or_with_beams_there_is_no_progress(http: Any, fields: Any):
    body = {**CASES[CHAT], "max_tokens": 4, "return_progress": True, **fields}
    response = await http.post(CHAT, json=body)
    assert response.headers["x-servd-ignored"] == "return_progress"
    assert "prompt_progress" not in response.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": user("hi"), "max_tokens": 4}),
        ("/api/chat", {"model": MODEL, "messages": user("hi"), "stream": True}),
        ("/api/generate", {"model": MODEL, "prompt": "hi", "stream": False}),
    ],
)
async def test_the_header_lists_progress_that_no_answer_has(http: Any, route: str, body: Any):
    response = await http.post(route, json=body | {"return_progress": True})
    assert response.status_code == 200
    assert response.headers["x-servd-ignored"] == "return_progress"
    assert "prompt_progress" not in response.text
