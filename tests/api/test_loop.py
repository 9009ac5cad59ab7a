"""One request does not hold up the others: what takes long is refused, or done off the event loop.

Measured in the CPU time of the process: what other processes do to the clock does not count, a
thread that keeps the interpreter to itself does. The engine of these tests runs on the same loop,
so a little of what is measured is its own.
"""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.api.harness import serve, user

MAX_LAG = 1.0  # CPU seconds; each of these requests held up the loop for 1.3 to 22 seconds
LOOP_SECONDS = 0.03  # that `loop_seconds` takes on the machine where that was measured
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = {"messages": user("hi"), "max_tokens": 1}
REQUESTS = {
    "long bad words": (CHAT, HI | {"bad_words": ["word " * 1600] * 500}, 400),
    "batch with a long field that has no effect": (
        f"{CHAT}/batch",
        HI | {"messages": [HI["messages"]] * 1024, "unknown": "x" * 200_000},
        200,
    ),
    "prompt logprobs of many choices": (
        COMPLETION,
        {"prompt": "a" * 4000, "n": 128, "max_tokens": 1, "prompt_logprobs": 20},
        400,
    ),
    "top logprobs of many choices": (
        CHAT,
        HI | {"n": 32, "max_tokens": 200, "logprobs": True, "top_logprobs": 20, "ignore_eos": True},
        200,
    ),
    "many wrong forms": ("/v2/embed", {"texts": ["a"], "embedding_types": ["x"] * 400_000}, 400),
    "many empty lists": (CHAT, HI | {"unknown": [[]] * 4_000_000}, 400),
    "many fields": (CHAT, HI | {f"field{i}": i for i in range(600_000)}, 400),
    "many prompts": (COMPLETION, {"prompt": ["a" * 4000] * 1024, "max_tokens": 1}, 200),
    "the strings of many tokens": (
        "/tokenize",
        {"prompt": "a b" * 500_000, "return_token_strs": True},
        200,
    ),
}


def loop_seconds() -> float:
    """CPU seconds of a loop: how fast this machine is now."""
    before = time.process_time()
    for _ in range(1_000_000):
        pass
    return time.process_time() - before


@pytest.mark.parametrize(("path", "body", "status"), REQUESTS.values(), ids=REQUESTS.keys())
async def test_no_request_holds_up_the_loop(path, body, status):
    data = json.dumps(body).encode()
    lags = []

    async def tick() -> None:
        while True:
            before = time.process_time()
            try:
                await asyncio.sleep(0.001)
            finally:  # also when cancelled, by a refusal quicker than a tick or after a long hold
                lags.append(time.process_time() - before)

    async with serve(max_waiting_requests=4096) as server:
        ticking = asyncio.create_task(tick())
        response = await server.http.post(
            path, content=data, headers={"content-type": "application/json"}, timeout=60
        )
        ticking.cancel()
        await asyncio.wait([ticking])
    assert response.status_code == status, response.text[:300]
    assert max(lags) < MAX_LAG * max(1, loop_seconds() / LOOP_SECONDS)
