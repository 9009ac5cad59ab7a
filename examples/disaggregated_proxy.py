"""Has one server compute prompts and another go on with the answers (docs/how-to/disaggregated.md).

Usage: python examples/disaggregated_proxy.py PREFILL_URL DECODE_URL [PORT]
"""

from __future__ import annotations

import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

if len(sys.argv) < 3:
    sys.exit(__doc__)
prefill, decode, port = [*sys.argv[1:], "8000"][:3]
http = httpx.AsyncClient(timeout=None)


async def answer(request: Request) -> Response:
    """Both halves of a chat or completion; if the first server cannot, the second does it all."""
    path = request.url.path
    body = await request.json()
    headers = {k: v for k, v in request.headers.items() if k in ("authorization", "x-request-id")}
    first = {k: v for k, v in body.items() if k not in ("stream_options", "max_completion_tokens")}
    first |= {"stream": False, "max_tokens": 1, "n": 1}
    first["kv_transfer_params"] = {"do_remote_decode": True}
    try:
        computed = await http.post(prefill + path, json=first, headers=headers)
        body["kv_transfer_params"] = computed.raise_for_status().json()["kv_transfer_params"]
    except httpx.HTTPError as error:
        print(f"{prefill}: {error}", file=sys.stderr)
    sent = http.build_request("POST", decode + path, json=body, headers=headers)
    answered = await http.send(sent, stream=True)
    passed = {"content-type": answered.headers["content-type"]}
    return StreamingResponse(
        answered.aiter_raw(),
        answered.status_code,
        passed,
        background=BackgroundTask(answered.aclose),
    )


routes = [
    Route(path, answer, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")
]
uvicorn.run(Starlette(routes=routes), port=int(port), log_level="warning")
