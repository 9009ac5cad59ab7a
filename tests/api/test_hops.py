"""How many functions of servd a short chat goes through from the ASGI entry to the engine's
channel: layers that only pass things on have to be noticed.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

import servd
from servd.api.protocol.validation import parse
from tests.api.harness import MODEL, Served, serve, user

ROOT = str(Path(servd.__file__).parent)
# A third of them turn away what must not go on: origins, bodies, clients out of turn, keys and
# queues over their limits, parameters out of bounds, slow templates, prompts that do not fit.
MOST = 54
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Hops:
    """Distinct functions and methods of servd in the order in which they are first entered, without
    lambdas, comprehensions, properties and what pydantic calls to validate the body.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.is_open = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not (self.is_open and event == "call" and code.co_filename.startswith(ROOT)):
            return
        if code.co_name.startswith("<") or _is_property(frame) or _is_validator(frame):
            return
        path = code.co_filename.removeprefix(f"{ROOT}/")
        self.names[f"{path}:{code.co_qualname}"] = None


def _is_property(frame: FrameType) -> bool:
    names = frame.f_code.co_qualname.split(".")
    found: Any = sys.modules[frame.f_globals["__name__"]]
    for name in names:
        found = getattr(found, name, None)
    return isinstance(found, property | functools.cached_property)


def _is_validator(frame: FrameType) -> bool:
    caller = frame.f_back
    while caller is not None and caller.f_code is not parse.__code__:
        caller = caller.f_back
    return caller is not None


async def hops(served: Served) -> list[str]:
    """From the application to the `send` of the engine's client."""
    counted, send = Hops(), served.engine.send

    async def app(scope: Scope, receive: Receive, reply: Send) -> None:
        counted.is_open = True
        await served.app(scope, receive, reply)

    def engine_send(message: Any) -> None:
        counted.is_open = False
        send(message)

    served.engine.send = engine_send  # type: ignore[method-assign]
    body = {"model": MODEL, "messages": user("Hi"), "tools": [TOOL], "max_tokens": 4}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://servd", transport=transport) as http:
        await http.post("/v1/chat/completions", json=body)  # what is made once is made
        counted.names.clear()
        sys.setprofile(counted)
        try:
            reply = await http.post("/v1/chat/completions", json=body)
        finally:
            sys.setprofile(None)
    assert reply.status_code == 200
    return list(counted.names)


async def test_a_chat_with_tools_goes_through_few_functions_to_the_engine() -> None:
    async with serve(tool_call_parser="hermes") as served:
        names = await hops(served)
    assert len(names) <= MOST, "\n".join([f"{len(names)} functions:", *names])
