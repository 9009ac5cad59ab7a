"""Load generator for OpenAI-compatible servers: sends completions, notes when chunks arrive."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tqdm import tqdm

from servd.cli.bench._data import Prompt


@dataclass
class Record:
    """What happened to one request. Times are seconds of the client's monotonic clock."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    started: float = 0.0
    chunks: list[float] = field(default_factory=list)  # arrival of every chunk with text
    ended: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.started

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with one token only."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.chunks)]


@dataclass(frozen=True)
class Load:
    url: str  # the server's, without /v1
    model: str
    concurrency: int | None = None  # most requests at once; None: no limit
    request_rate: float | None = (
        None  # requests a second, Poisson arrivals; None: as fast as concurrency allows
    )
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    chats: bool = False  # prompts are messages to /v1/chat/completions


async def run(
    load: Load, prompts: list[Prompt], show_progress: bool = True
) -> tuple[list[Record], float]:
    """Send all prompts; returns their records in order, and the seconds that all took."""
    limit = asyncio.Semaphore(load.concurrency or len(prompts))
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=_headers(load.api_key), timeout=timeout, connector=connector
    ) as session:
        hide = None if show_progress else True  # None: hidden unless stderr is a terminal
        with tqdm(total=len(prompts), desc="requests", disable=hide, dynamic_ncols=True) as bar:

            async def one(prompt: Prompt) -> Record:
                async with limit:
                    record = await _send(session, load, prompt)
                bar.update()
                return record

            started = time.perf_counter()
            tasks = [asyncio.create_task(one(prompt)) async for prompt in _arrivals(load, prompts)]
            records = await asyncio.gather(*tasks)
    return records, max(record.ended for record in records) - started


async def _arrivals(load: Load, prompts: list[Prompt]) -> AsyncIterator[Prompt]:
    rng = random.Random(load.seed)
    for prompt in prompts:
        yield prompt
        if load.request_rate is not None:
            await asyncio.sleep(rng.expovariate(load.request_rate))


async def _send(session: aiohttp.ClientSession, load: Load, prompt: Prompt) -> Record:
    body: dict[str, Any] = {
        "model": load.model,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.chats:
        body["messages"] = [{"role": "user", "content": prompt.content}]
        body["max_completion_tokens"] = prompt.output_len
    else:
        body |= {"prompt": prompt.content, "max_tokens": prompt.output_len}
    path = "chat/completions" if load.chats else "completions"
    if load.ignore_eos:
        body["ignore_eos"] = True
    record = Record(started=time.perf_counter())
    try:
        async with session.post(f"{load.url}/v1/{path}", json=body) as reply:
            if reply.status != 200:
                record.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
            else:
                await _read(reply, record)
    except (
        aiohttp.ClientError,
        OSError,
        ValueError,
        KeyError,
    ) as error:  # also an answer in another shape
        record.error = str(error) or type(error).__name__
    record.ended = time.perf_counter()
    return record


async def _read(reply: aiohttp.ClientResponse, record: Record) -> None:
    async for line in reply.content:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        chunk = json.loads(line[6:])
        if "error" in chunk:
            record.error = chunk["error"]["message"]
        elif chunk["choices"] and _has_text(chunk["choices"][0], is_first=not record.chunks):
            record.chunks.append(now)
        if usage := chunk.get("usage"):
            record.num_prompt_tokens = usage["prompt_tokens"]
            record.num_output_tokens = usage["completion_tokens"]
    if record.error is None and not record.num_output_tokens:
        record.error = "the stream ended without usage"


def _has_text(choice: dict[str, Any], is_first: bool) -> bool:
    """Whether a chunk tells of a token; the first may be no text. A chat's role is no token."""
    delta = choice.get("delta", choice)
    shown = any(delta.get(name) for name in ("text", "content", "reasoning", "reasoning_content"))
    return shown or (is_first and "role" not in delta)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
