"""Checks that an engine's blocks, slots and queues are consistent."""

from collections import Counter

from servd.core.engine_core import EngineCore
from servd.core.kv_cache.prefix_cache import NO_BLOCK
from servd.messages.engine import Audit, EngineAudit, EngineCoreOutputs


def problems(engine: EngineCore) -> list[str]:
    """Return a message for each invariant that is violated between two steps.

    Reference counts of blocks match the requests, and no block is both free and owned. Each slot is
    free or has one request. Each request runs or waits. An idle engine owns no blocks. The same is
    true of checkpoints.
    """
    scheduler = engine.scheduler
    pool = engine.scheduler.kv_cache.pool
    requests = scheduler.requests.values()
    pinned = Counter(scheduler.kv_cache.prefix_cache.pinned.blocks)
    owned = pinned + Counter(
        block for request in requests for block in request.block_ids if block != NO_BLOCK
    )
    wrong = [b for b in range(pool.num_blocks) if pool.ref_counts[b] != owned[b]]
    slots = sorted([*scheduler.free_slots, *(request.slot for request in scheduler.running)])
    checks = {
        f"blocks {wrong[:8]} have {[pool.ref_counts[b] for b in wrong[:8]]} references, the "
        f"requests and pinned prefixes have {[owned[b] for b in wrong[:8]]}": not wrong,
        f"{pool.num_free} of {pool.num_blocks} blocks are free, {len(owned)} are owned": (
            pool.num_free == pool.num_blocks - len(owned)
        ),
        "requests share a block that is not hashed": all(
            pool.hashes[block] is not None for block, owners in owned.items() if owners > 1
        ),
        f"the slots are {slots}": slots == list(range(len(slots)))
        and len(slots) == (engine.executor.config.scheduler.max_num_seqs),
        "the running requests are not in their order": scheduler.running
        == sorted(scheduler.running, key=lambda request: request.order),
        f"{len(requests)} requests, but {len(scheduler.running)} run and "
        f"{len(scheduler.waiting)} wait": len(requests)
        == len(scheduler.running) + len(scheduler.waiting),
        "no request is left, but steps or blocks are": bool(requests)
        or scheduler.has_work
        or not (engine.in_flight or len(owned) > len(pinned)),
    }
    if (states := scheduler.kv_cache.states) is not None:
        holders = Counter(states.owned)
        counts = states.pool.ref_counts
        misfits = [c for c in range(len(counts)) if counts[c] != holders[c]]
        checks[f"checkpoints {misfits[:8]} do not have as many references as holders"] = not misfits
        num_owners = len(states.owned) - len(states.pinned)
        checks[f"{num_owners} checkpoints belong to no running request"] = num_owners <= len(
            scheduler.running
        )
    violated = [problem for problem, is_well in checks.items() if not is_well]
    return violated + scheduler.kv_cache.connector.find_problems()


def audit(message: Audit, engine: EngineCore) -> list[EngineCoreOutputs | EngineAudit]:
    """Return the messages that answer a client's Audit: current statistics, because the client's
    may be outdated, and the violated invariants.
    """
    stats = engine.scheduler.report(engine.grammars.num_waiting)
    requests = [*engine.scheduler.requests.values(), *engine.grammars.waiting()]
    mine = [request.request_id for request in requests if request.client == message.client]
    result = EngineAudit(message.number, problems(engine), mine, len(requests))
    return [EngineCoreOutputs([], stats), result]
