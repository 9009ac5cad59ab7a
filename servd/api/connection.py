"""while_connected cancels work if its client disconnects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """If the client disconnects, cancel the `with` block and raise ClientDisconnect. Read the
    request's body before entering the block.
    """
    task = asyncio.current_task()
    has_left = False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()
