"""Count the functions of servd that a plain chat enters from socket to ZMQ, and list them:
`python -m tools.count_calls`.

Properties and pydantic's validators do not count.
"""

import asyncio
import json
import sys
import threading
from types import FrameType
from typing import Any

from tests.api.harness import listening, serve

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


class Profile:
    """The functions entered until a request is sent, in order."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        self.is_over = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        _, is_servd, module = code.co_filename.rpartition("/servd/")
        is_generated = code.co_name.startswith("<")
        if event != "call" or self.is_over or not is_servd or is_generated:
            return
        if is_property(frame) or is_validator(frame):
            return
        self.functions.setdefault(f"{module}: {code.co_qualname}")


def is_property(frame: FrameType) -> bool:
    """Return whether a frame runs the getter of a property of its first argument's class."""
    code = frame.f_code
    owner = frame.f_locals.get("self")
    member = getattr(type(owner), code.co_name, None) if owner is not None else None
    return isinstance(member, property)


def is_validator(frame: FrameType) -> bool:
    """Return whether pydantic, whose core is not Python, calls this function of a body's module."""
    caller = frame.f_back
    is_protocol = "/api/protocol/" in frame.f_code.co_filename
    return is_protocol and caller is not None and "/pydantic/" in caller.f_code.co_filename


async def count() -> list[str]:
    """Return the functions that one chat enters, after another has loaded what is loaded once."""
    profile = Profile()
    async with serve() as served, listening(served.app) as url:
        port = int(url.rpartition(":")[2])
        await ask(port)
        send = served.engine.send

        def last_send(message: Any) -> None:
            profile.is_over = True
            send(message)

        served.engine.send = last_send
        threading.setprofile_all_threads(profile) if sys.version_info >= (3, 12) else (
            threading.setprofile(profile)
        )
        sys.setprofile(profile)
        await ask(port)
        sys.setprofile(None)
    return list(profile.functions)


async def ask(port: int) -> None:
    body = json.dumps(BODY)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    answer = await reader.read()
    assert b" 200 " in answer.splitlines()[0], answer
    writer.close()


def main() -> None:
    functions = asyncio.run(count())
    for function in functions:
        print(function)
    print(len(functions))


if __name__ == "__main__":
    main()
