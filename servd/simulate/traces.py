"""Traces: requests of a recording or of a published trace, or generated in a similar shape."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from servd.base.errors import ConfigError

OPTIONS = (  # what `servd simulate` can vary
    "block_size",
    "enable_prefix_caching",
    "kv_offloading_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "data_parallel_size",
    "max_model_len",
)
BLOCK_SIZE = 16  # of generated traces
SYSTEM_PROMPTS = 64  # of the whole cluster; the first is the most popular


class ServerLine(msgspec.Struct):
    """The engines of a recording."""

    num_blocks: int
    kv_bytes_per_block: int
    options: dict[str, Any]
    kv_windows: tuple[int | None, ...] = (None,)  # see WorkerReady


class StepLine(msgspec.Struct, array_like=True, gc=False):
    engine: int
    started_ns: int
    collected_ns: int
    num_tokens: int
    num_requests: int


class RequestLine(msgspec.Struct, omit_defaults=True, gc=False):
    """A choice of a prompt, with the keys of published traces and more."""

    timestamp: float  # of its arrival, in milliseconds
    input_length: int
    output_length: int
    # Equal if the prompts are, up to the end of the block. The last block may be partly filled.
    hash_ids: list[int] = []
    output_hash_ids: list[int] = []  # of blocks that the answer completed
    block_size: int = 512  # tokens
    max_tokens: int | None = None
    client: str = ""
    engine: int = 0
    cached: int = 0  # tokens found in the prefix cache
    # Milliseconds after the arrival; 0: the request did not get there.
    sent: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    returned: float = 0.0  # the API server has the last token


@dataclass(frozen=True)
class Recording:
    requests: list[RequestLine]  # by arrival
    steps: list[StepLine]
    server: ServerLine | None = None


def read(path: str) -> Recording:
    """Return a recording from a file of --record-trace, or from a trace with Mooncake's keys."""
    requests: list[RequestLine] = []
    steps: list[StepLine] = []
    server = None
    number = 0
    try:
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):  # noqa: B007 - an error names it
            if line.startswith(b'{"step"'):
                steps.append(msgspec.json.decode(line, type=dict[str, StepLine])["step"])
            elif line.startswith(b'{"server"'):
                server = msgspec.json.decode(line, type=dict[str, ServerLine])["server"]
            elif line.strip():
                requests.append(msgspec.json.decode(line, type=RequestLine))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}, line {number}: {error}; a TRACE is a file of --record-trace, or a file "
            "with the same keys"
        ) from None
    requests.sort(key=lambda request: request.timestamp)
    return Recording(requests, steps, server)


@dataclass(frozen=True)
class Shape:
    """The shape of conversations: medians of tokens, and of seconds between two turns."""

    system: int  # of the prompt that many conversations share
    first: int  # of the first message
    more: int  # of each later message
    output: int
    turns: float  # mean
    pause: float
    spread: float = 0.8  # sigma of the lognormal lengths


SHAPES = {
    "short": Shape(system=64, first=60, more=30, output=60, turns=3, pause=10),
    "chat": Shape(system=400, first=300, more=100, output=130, turns=4, pause=30),
    "agent": Shape(system=3000, first=2000, more=500, output=80, turns=10, pause=5),
    "code": Shape(system=200, first=1200, more=200, output=15, turns=3, pause=8),
}


def make_requests(
    shape: Shape, num_requests: int, rate: float, max_tokens: int
) -> Iterator[RequestLine]:
    """Yield generated requests, `rate` a second (Poisson). Conversations end at `max_tokens`."""
    rng = Random(0)
    ids = count(1)
    order = count()
    chances = [*accumulate(1 / place for place in range(1, SYSTEM_PROMPTS + 1))]
    systems = [
        [next(ids) for _ in range(shape.system // BLOCK_SIZE)] for _ in range(SYSTEM_PROMPTS)
    ]
    # When a turn comes, its blocks, its tokens and how many turns follow.
    turns: list[tuple[float, int, list[int], int, int]] = []

    def tokens(median: int) -> int:
        return max(round(median * rng.lognormvariate(0, shape.spread)), 1)

    begin = 0.0  # of the next conversation
    for _ in range(num_requests):
        while not turns or turns[0][0] > begin:
            blocks = rng.choices(systems, cum_weights=chances)[0]
            length = len(blocks) * BLOCK_SIZE + tokens(shape.first)
            more = 0
            while rng.random() > 1 / shape.turns:
                more += 1
            heappush(turns, (begin, next(order), blocks, length, more))
            begin += rng.expovariate(rate / shape.turns)
        at, _, blocks, length, more = heappop(turns)
        length = min(length, max_tokens - 1)
        output = min(tokens(shape.output), max_tokens - length)
        blocks = blocks + [next(ids) for _ in range((length + output) // BLOCK_SIZE - len(blocks))]
        num_prompt = length // BLOCK_SIZE
        yield RequestLine(
            1000 * at, length, output, blocks[:num_prompt], blocks[num_prompt:], BLOCK_SIZE
        )
        if more and length + output + shape.more < max_tokens:
            # The last block, filled in part by this turn, is filled by the next.
            then = at + rng.lognormvariate(0, 0.5) * shape.pause
            following = length + output + tokens(shape.more)
            heappush(turns, (then, next(order), blocks, following, more - 1))
