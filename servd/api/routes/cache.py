"""GET /v1/cache: usage of the KV cache and its offload storage; GET /kv_event_sources; POST
/reset_prefix_cache.
"""

import re

import msgspec
from fastapi import APIRouter, Request, Response

from servd.api.context import context_of, json_response
from servd.api.http.route import Route, refusals
from servd.base.errors import Unavailable
from servd.config.kv_events import KVEventsConfig
from servd.messages.engine import EngineReady
from servd.messages.stats import SchedulerStats

router = APIRouter(route_class=Route)

ANYWHERE = re.compile(r"(?<=^tcp://)(\*|\[::\])(?=:)")


class Tier(msgspec.Struct):
    """Usage of a tier of the KV cache: the device, host memory, or files. The fields have the order
    of those of KVStoreStats.
    """

    name: str
    blocks: int  # on the device, blocks that requests own; elsewhere, stored blocks
    max_blocks: int
    bytes: int  # on the disk, bytes of all engines that use the folder
    max_bytes: int
    hits: int = 0  # blocks loaded from this tier
    damaged: int = 0  # files whose content did not match their names
    skipped: bool = False  # because computing a block is faster


class EngineCache(msgspec.Struct):
    """The latest reported KV cache usage of an engine."""

    rank: int  # among --data-parallel-size
    block_size: int  # tokens
    num_swapped: int  # requests that wait after they were preempted, with offloaded blocks
    tiers: list[Tier]  # the fastest first
    pinned: int = 0  # blocks of the device that stay until a time
    max_pinned: int = 0
    # Models with recurrent states: checkpoints that are cached or in use, and bytes on all devices.
    checkpoints: int = 0
    state_bytes: int = 0
    max_state_bytes: int = 0


class Cache(msgspec.Struct):
    """The KV cache usage of all engines that serve."""

    engines: list[EngineCache]


@router.get("/v1/cache", response_model=Cache, responses=refusals(503))
async def cache(request: Request) -> Response:
    """Show the blocks and bytes of the KV cache on the device, in host memory and in files."""
    share = context_of(request).config.cache.max_pinned_share
    models = [
        _cache_of(engine.rank, engine.status, engine.stats, share)
        for engine in context_of(request).async_llm.engines
        if isinstance(engine.status, EngineReady)
    ]
    if not models:
        raise Unavailable("the model is still loading: retry later", retry_after=5)
    return json_response(Cache(models))


class EventSource(msgspec.Struct):
    """Endpoints where an engine publishes its KV events, with vLLM's field names."""

    data_parallel_rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str


@router.get("/kv_event_sources", response_model=list[EventSource])
async def kv_event_sources(request: Request) -> Response:
    """List the endpoints of each engine's KV events. For an engine that listens on all addresses,
    the endpoint has the address that received this request.
    """
    config = context_of(request).config
    events_config = config.cache.kv_events_config or KVEventsConfig()
    ranks = range(config.parallel.data_parallel_size if events_config.is_on else 0)
    events = [events_config.of_rank(rank) for rank in ranks]
    here = _host_of(request)
    sources = [
        EventSource(
            event.data_parallel_rank,
            ANYWHERE.sub(here, event.endpoint),
            event.replay_endpoint and ANYWHERE.sub(here, event.replay_endpoint),
            event.topic,
        )
        for event in events
    ]
    return json_response(sources)


def _host_of(request: Request) -> str:
    """Return the server address that received the request; `*` for a Unix socket."""
    host, port = request.scope.get("server") or ("*", None)
    if port is None:
        return "*"
    return f"[{host}]" if ":" in host else host


@router.post("/reset_prefix_cache", response_model=dict[str, str])
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix caches of all engines, but not --kv-cache-dir."""
    context_of(request).async_llm.reset_prefix_cache()
    return json_response({})


def _cache_of(rank: int, ready: EngineReady, stats: SchedulerStats, share: float) -> EngineCache:
    block = ready.worker.kv_bytes_per_block
    num_blocks = ready.worker.num_blocks
    used = round(stats.kv_cache_usage * num_blocks)
    tiers = [Tier("device", used, num_blocks, used * block, num_blocks * block)]
    tiers += [Tier(*msgspec.structs.astuple(store)) for store in stats.kv_stores or ready.kv_stores]
    return EngineCache(
        rank,
        ready.block_size,
        stats.num_swapped,
        tiers,
        stats.num_pinned,
        int(num_blocks * share),
        stats.num_checkpoints,
        stats.state_cache_bytes,
        stats.max_state_cache_bytes,
    )
