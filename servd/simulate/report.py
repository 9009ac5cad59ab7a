"""Figures of a simulation, and the same figures as a recording measured them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp

from servd.simulate.cluster import ClusterSim
from servd.simulate.traces import RequestLine

PERCENTILES = (50, 90, 99)


def simulated_figures(sim: ClusterSim) -> dict[str, float]:
    tally = sim.tally
    seconds = (tally.ended_ns - tally.began_ns) / 1e9
    busy = [engine.busy_ns / 1e9 for engine in sim.engines]
    mean = sum(busy) / len(busy)
    tiers = [tier for engine in sim.engines for tier in engine.scheduler.report(0).tiers]
    host_hits = sum(tier.num_hits for tier in tiers if tier.name == "host")
    num_prompt = max(tally.num_prompt, 1)
    num_compared = max(tally.num_compared, 1)
    return {
        **_throughput(seconds, tally.num_prompt, tally.num_output, len(tally.latency)),
        "refused": tally.num_refused,
        "engines": len(busy),
        "busy_%": 100 * mean / max(seconds, 1e-9),
        "busiest_over_mean": max(busy) / max(mean, 1e-9),
        "steps": tally.num_steps,
        "prefix_hits_%": 100 * tally.num_cached / num_prompt,
        "lost_by_routing_%": 100 * tally.num_lost / num_compared,
        "lost_by_balancing_%": 100 * tally.num_lost_outside / num_compared,
        "host_hits_%": 100 * host_hits * sim.block_size / num_prompt,
        **_spread("ttft", tally.ttft),
        **_spread("tpot", tally.tpot),
        **_spread("request", tally.latency),
        **_spread_gaps(tally.gaps),
    }


def measured_figures(requests: Sequence[RequestLine]) -> dict[str, float]:
    done = [each for each in requests if each.finished]
    begin = min(each.timestamp + each.sent for each in done)
    seconds = (max(each.timestamp + each.finished for each in done) - begin) / 1000
    num_prompt = sum(each.input_length for each in done)
    num_output = sum(each.output_length for each in done)
    ttft = [1e6 * (each.first_token + each.returned - each.finished) for each in done]
    tpot = [
        1e6 * (each.finished - each.first_token) / (each.output_length - 1)
        for each in done
        if each.output_length > 1
    ]
    return {
        **_throughput(seconds, num_prompt, num_output, len(done)),
        "engines": len({each.engine for each in requests}),
        "prefix_hits_%": 100 * sum(each.cached for each in done) / max(num_prompt, 1),
        **_spread("ttft", ttft),
        **_spread("tpot", tpot),
        **_spread("request", [1e6 * each.returned for each in done]),
    }


def _throughput(seconds: float, num_prompt: int, num_output: int, count: int) -> dict[str, float]:
    seconds = max(seconds, 1e-9)
    return {
        "requests": count,
        "seconds": seconds,
        "prompt_tokens_mean": num_prompt / max(count, 1),
        "output_tokens_mean": num_output / max(count, 1),
        "requests_per_s": count / seconds,
        "output_tokens_per_s": num_output / seconds,
    }


def _spread(name: str, nanoseconds: Iterable[float]) -> dict[str, float]:
    values = sorted(nanoseconds)
    if not values:
        return {}
    found = {f"{name}_ms_mean": sum(values) / len(values) / 1e6}
    for p in PERCENTILES:
        found[f"{name}_ms_p{p}"] = values[min(len(values) * p // 100, len(values) - 1)] / 1e6
    return found


def _spread_gaps(gaps: Counter[int]) -> dict[str, float]:
    """Return percentiles in milliseconds, to a percent."""
    found: dict[str, float] = {}
    num_before = 0
    for place, number in sorted(gaps.items()):
        num_before += number
        for p in PERCENTILES:
            if num_before * 100 >= p * gaps.total():
                found.setdefault(f"itl_ms_p{p}", exp(place / 100) / 1e6)
    return found
