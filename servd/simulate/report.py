"""Summarizes the requests of a recording or a simulation in figures."""

from collections.abc import Iterable, Sequence
from math import exp

from servd.simulate.cluster import ClusterSim
from servd.simulate.traces import RequestLine

PERCENTILES = (50, 90, 99)
SATURATED = 95.0  # percent of the time that engines are busy, from which on requests queue up


def summarise(requests: Sequence[RequestLine]) -> dict[str, float]:
    """Return the figures that recordings can have, too. Times are in milliseconds."""
    done = [request for request in requests if request.finished]
    begin = min((request.timestamp + request.sent for request in done), default=0.0)
    end = max((request.timestamp + request.finished for request in done), default=0.0)
    seconds = max((end - begin) / 1000, 1e-9)
    count = max(len(done), 1)
    num_prompt = sum(request.input_length for request in done)
    num_output = sum(request.output_length for request in done)
    long = [request for request in done if request.output_length > 1]
    tpot = [(line.finished - line.first_token) / (line.output_length - 1) for line in long]
    return {
        "requests": len(done),
        "seconds": seconds,
        "prompt_tokens_mean": num_prompt / count,
        "output_tokens_mean": num_output / count,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "engines": len({request.engine for request in requests}),
        "prefix_hits_%": 100 * sum(request.cached for request in done) / max(num_prompt, 1),
        **_spread("ttft", [line.first_token + line.returned - line.finished for line in done]),
        **_spread("tpot", tpot),
        **_spread("request", [request.returned for request in done]),
    }


def summarise_simulation(sim: ClusterSim) -> dict[str, float]:
    figures = summarise(sim.served)
    busy = [engine.busy_ns / 1e9 for engine in sim.engines]
    mean = sum(busy) / len(busy)
    kv_stores = [store for engine in sim.engines for store in engine.scheduler.report(0).kv_stores]
    host_hits = sum(store.num_hits for store in kv_stores if store.name == "host")
    num_prompt = max(sum(request.input_length for request in sim.served), 1)
    figures |= {
        "refused": sim.num_refused,
        "engines": len(busy),
        "busy_%": 100 * mean / figures["seconds"],
        "busiest_over_mean": max(busy) / max(mean, 1e-9),
        "steps": sim.num_steps,
        "lost_by_routing_%": 100 * sim.num_lost / max(sim.num_compared, 1),
        "lost_by_balancing_%": 100 * sim.num_lost_outside / max(sim.num_compared, 1),
        "host_hits_%": 100 * host_hits * sim.block_size / num_prompt,
    }
    num_before = 0
    for place, number in sorted(sim.gaps.items()):
        num_before += number
        for p in PERCENTILES:
            if num_before * 100 >= p * sim.gaps.total():
                figures.setdefault(f"itl_ms_p{p}", exp(place / 100) / 1e6)
    return figures


def verdict(figures: dict[str, float]) -> str:
    """Return a sentence about what `summarise_simulation` returned."""
    is_full = figures["busy_%"] >= SATURATED or figures["refused"]
    half, p99 = (figures.get(f"ttft_ms_{name}", 0.0) for name in ("p50", "p99"))
    return (
        f"{'saturated' if is_full else 'keeping up'}: engines busy {figures['busy_%']:.0f} % of "
        f"the time, {figures['refused']} requests refused, half of the first tokens within "
        f"{half:.0f} ms, 99 % within {p99:.0f} ms"
    )


def _spread(name: str, milliseconds: Iterable[float]) -> dict[str, float]:
    values = sorted(milliseconds)
    if not values:
        return {}
    figures = {f"{name}_ms_mean": sum(values) / len(values)}
    for p in PERCENTILES:
        figures[f"{name}_ms_p{p}"] = values[min(len(values) * p // 100, len(values) - 1)]
    return figures
