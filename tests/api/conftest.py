"""Fixtures of the API room's tests: running servers, see harness.py."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.harness import Served, serve


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A ready server, called without a socket."""
    async with serve() as server:
        yield server


@pytest.fixture
async def listening_server() -> AsyncIterator[Served]:
    """A ready server behind uvicorn, where streams and disconnects are real."""
    async with serve(listen=True) as server:
        yield server


@pytest.fixture
async def http(served: Served) -> httpx.AsyncClient:
    """A client of a ready server."""
    return served.http
