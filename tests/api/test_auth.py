"""API keys: every route is guarded but liveness and the console, which says nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from starlette.routing import Route

from servd.api import console
from servd.api.auth import OPEN_PATHS
from servd.api.routes import load_routers
from servd.messages import EngineCoreRequest
from tests.api.harness import MODEL, Served, serve, user

KEYS = ["first-key", "zweiter-schlüssel"]


@pytest.fixture
async def guarded() -> AsyncIterator[Served]:
    async with serve(listen=True, api_key=KEYS) as served:
        yield served


async def test_every_route_but_liveness_and_the_console_needs_a_key(guarded: Served):
    paths = {
        "/nothing",
        "//health",
        "/health/",
        "/HEALTH",
        "/health/%2e%2e",  # httpx would make / of /health/..
        "/v1/models/x",
        "/docs",
        "/openapi.json",
    }
    paths |= {
        route.path
        for router in load_routers()
        for route in router.routes
        if isinstance(route, Route)
    }
    assert {"/", "/v1/chat/completions", "/metrics"} <= paths
    open_paths = OPEN_PATHS | console.open_paths()
    for path in sorted(paths - open_paths):
        for method in ("GET", "POST", "OPTIONS"):
            answer = await guarded.http.request(method, f"{guarded.url}{path}")
            assert answer.status_code == 401, path
    assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in open_paths:
        assert (await guarded.http.get(path)).status_code == 200


@pytest.mark.parametrize("key", KEYS)
async def test_every_key_opens_in_both_headers(guarded: Served, key):
    for name, value in (
        ("authorization", f"Bearer {key}"),
        ("Authorization", f"bearer  {key}"),
        ("x-api-key", key),
    ):
        answer = await guarded.http.get("/version", headers={name.encode(): value.encode()})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-keyy"},
        {"Authorization": "Bearer FIRST-KEY"},
        {"x-api-key": ""},
        {"api-key": "first-key"},
    ],
)
async def test_everything_else_does_not(guarded: Served, headers):
    assert (await guarded.http.get("/version", headers=headers)).status_code == 401


async def test_headers_cannot_rename_the_path(guarded: Served):
    headers = {"Host": "x/health?", "X-Forwarded-Path": "/health", "X-Original-URL": "/health"}
    assert (await guarded.http.get("/v1/models", headers=headers)).status_code == 401


async def test_the_openai_client(guarded: Served):
    async with openai.AsyncOpenAI(
        base_url=f"{guarded.url}/v1", api_key=KEYS[0], max_retries=0
    ) as client:
        assert (
            await client.chat.completions.create(model=MODEL, messages=user("hi"), max_tokens=1)
        ).choices
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.with_options(api_key="wrong").models.list()
        assert refused.value.code == "invalid_api_key"


PROMPT = "the same long beginning " * 10
REQUESTS = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "use_beam_search": True, "n": 2}),
    ("/v1/chat/completions", {"messages": user(PROMPT), "max_tokens": 1}),
    ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1}),
    ("/v1/messages", {"model": MODEL, "messages": user(PROMPT), "max_tokens": 1}),
]


def num_cached_tokens(answer: httpx.Response) -> int:
    """However the API calls them."""
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_no_key_sees_in_the_cache_what_another_has_sent(path: str, body: dict[str, object]):
    async with serve(api_key=KEYS[:1] + ["second-key"]) as served:

        async def cached(key: str, **more: str) -> int:
            headers = {"x-api-key": key}
            answer = await served.http.post(path, json={**body, **more}, headers=headers)
            assert answer.status_code == 200, answer.text
            return num_cached_tokens(answer)

        assert await cached("first-key") == 0
        assert await cached("second-key") == 0
        assert await cached("first-key") > 0 and await cached("second-key") > 0
        assert await cached("first-key", cache_salt="mine") == 0
        assert await cached("second-key", cache_salt="mine") == 0
        assert await cached("second-key", cache_salt="mine") > 0


async def test_vectors_share_no_cache_between_keys_either():
    async with serve(api_key=KEYS[:1] + ["second-key"]) as served:
        for key in ("first-key", "second-key"):
            await served.http.post(
                "/v1/embeddings", json={"input": PROMPT}, headers={"x-api-key": key}
            )
        salts = [
            r.options.cache_salt for r in served.engine.sent if isinstance(r, EngineCoreRequest)
        ]
        assert len(set(salts)) == 2 and None not in salts


async def test_one_key_shares_its_cache_as_without_keys():
    async with serve(api_key=KEYS[:1]) as served:
        path, body = REQUESTS[0]
        for _ in range(2):
            await served.http.post(path, json=body, headers={"x-api-key": KEYS[0]})
        assert {r.options.cache_salt for r in served.engine.sent} == {None}
