"""Load generator for OpenAI-compatible servers: sends completions, records when chunks arrive."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
from tqdm import tqdm

from servd.bench._data import BenchPrompt
from servd.bench._report import Record
from servd.config.keys import clean_key


@dataclass(frozen=True)
class LoadGenerator:
    url: str  # the server's, without /v1
    model: str
    concurrency: int | None = None  # most requests at once; None: no limit
    request_rate: float | None = None  # a second, Poisson arrivals; None: all at once
    api_key: str | None = None
    ignore_eos: bool = True
    seed: int = 0
    chats: bool = False  # prompts are messages to /v1/chat/completions


async def run(
    load: LoadGenerator, prompts: Sequence[BenchPrompt], show_progress: bool = True
) -> tuple[list[Record], float]:
    """Send all prompts; return their records in order, and the seconds that all took."""
    rng = random.Random(load.seed)
    headers = {"authorization": f"Bearer {clean_key(load.api_key)}"} if load.api_key else {}
    limit = asyncio.Semaphore(load.concurrency) if load.concurrency else nullcontext()
    hide = None if show_progress else True  # None: hidden unless stderr is a terminal
    tasks: list[asyncio.Task[Record]] = []
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        with tqdm(total=len(prompts), desc="requests", disable=hide, dynamic_ncols=True) as bar:

            async def send(prompt: BenchPrompt) -> Record:
                async with limit:
                    record = await _send(session, load, prompt)
                bar.update()
                return record

            started = time.perf_counter()
            for prompt in prompts:
                tasks.append(asyncio.create_task(send(prompt)))
                if load.request_rate is not None:
                    await asyncio.sleep(rng.expovariate(load.request_rate))
            records = await asyncio.gather(*tasks)
    return records, max(record.ended for record in records) - started


async def _send(session: aiohttp.ClientSession, load: LoadGenerator, prompt: BenchPrompt) -> Record:
    body: dict[str, Any] = {
        "model": load.model,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.chats:
        path = "chat/completions"
        content: Any = prompt.prompt
        if prompt.images:
            urls = ({"url": url} for url in prompt.images)
            content = [{"type": "image_url", "image_url": url} for url in urls]
            content.append({"type": "text", "text": prompt.prompt})
        body["messages"] = [{"role": "user", "content": content}]
        body["max_completion_tokens"] = prompt.output_len
    else:
        path = "completions"
        body |= {"prompt": prompt.prompt, "max_tokens": prompt.output_len}
    if load.ignore_eos:
        body["ignore_eos"] = True
    record = Record(started=time.perf_counter())
    try:
        async with session.post(f"{load.url}/v1/{path}", json=body) as reply:
            if reply.status == 200:
                await _read(reply, record)
            else:
                record.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:  # or of another shape
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
        elif chunk["choices"] and _has_token(chunk["choices"][0], is_first=not record.chunks):
            record.chunks.append(now)
        if usage := chunk.get("usage"):
            record.num_prompt_tokens = usage["prompt_tokens"]
            record.num_output_tokens = usage["completion_tokens"]
    if record.error is None and not record.num_output_tokens:
        record.error = "the stream ended without usage"


def _has_token(choice: dict[str, Any], is_first: bool) -> bool:
    """Return whether a chunk has a token. The first may lack text. A chat's role is no token."""
    delta = choice.get("delta", choice)
    has_text = any(delta.get(key) for key in ("text", "content", "reasoning", "reasoning_content"))
    return has_text or (is_first and "role" not in delta)
