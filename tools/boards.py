"""The Grafana boards of docker/grafana/boards, written by `make docs` from the tables here."""

from __future__ import annotations

import json
from typing import Any

SOURCE = {"type": "prometheus", "uid": "prometheus"}
OF = '{model_name=~"$model_name"}'
COLUMNS = 2
WIDTH = 12
HEIGHT = 8
STAGES = ("queue", "prefill", "decode")
DRAFTS = "vllm:spec_decode_num"
ENDED = "vllm:request_success_total"
OF_ABORTED = '{model_name=~"$model_name", finished_reason="abort"}'

# Title of a panel, its unit, and its queries: legend -> expression.
Panel = tuple[str, str, dict[str, str]]


def rate(metric: str, by: str = "", of: str = OF) -> str:
    """Per second, over all engines or `by` a label."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{of}[$__rate_interval]))"


def quantiles(histogram: str) -> dict[str, str]:
    """Quantiles of what was observed lately."""
    buckets = rate(f"{histogram}_bucket", by="le")
    return {
        f"p{percent}": f"histogram_quantile({percent / 100:g}, {buckets})"
        for percent in (50, 90, 99)
    }


def mean(histogram: str) -> str:
    """Mean of what was observed lately."""
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


SERVING: list[Panel] = [
    ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
    ("Whole requests", "s", quantiles("vllm:e2e_request_latency_seconds")),
    (
        "Where their time goes (mean)",
        "s",
        {stage: mean(f"vllm:request_{stage}_time_seconds") for stage in STAGES},
    ),
    (
        "Tokens per second",
        "short",
        {
            "prompt, computed": rate("servd:computed_prompt_tokens_total"),
            "prompt, cached": rate("vllm:prompt_tokens_cached_total"),
            "generated": rate("vllm:generation_tokens_total"),
        },
    ),
    (
        "Requests",
        "short",
        {
            "running": f"sum (vllm:num_requests_running{OF})",
            "waiting": f"sum (vllm:num_requests_waiting{OF})",
        },
    ),
    ("Ended requests per second", "reqps", {"{{finished_reason}}": rate(ENDED, "finished_reason")}),
    (
        "Refused requests per second",
        "reqps",
        {"{{reason}}": rate("vllm:admission_rejections_total", "reason")},
    ),
    (
        "Aborted requests: share of the ended ones",
        "percentunit",
        {"aborted": f"{rate(ENDED, of=OF_ABORTED)} / {rate(ENDED)}"},
    ),
    ("Time until an abort", "s", quantiles("servd:aborted_request_latency_seconds")),
    ("Prompt tokens of a request", "short", quantiles("vllm:request_prompt_tokens")),
    ("Generated tokens of a request", "short", quantiles("vllm:request_generation_tokens")),
]
ENGINE: list[Panel] = [
    ("KV cache in use", "percentunit", {"engine {{engine}}": f"vllm:kv_cache_usage_perc{OF}"}),
    (
        "Prefix cache: share of prompt tokens found",
        "percentunit",
        {
            "found": f"{rate('vllm:prefix_cache_hits_total')} / "
            f"{rate('vllm:prefix_cache_queries_total')}"
        },
    ),
    (
        "Checkpoints of recurrent states: share of requests that began at one",
        "percentunit",
        {
            "hits": f"{rate('servd:state_cache_hits_total')} / "
            f"{rate('servd:state_cache_queries_total')}"
        },
    ),
    (
        "Restarts of engines in the last 15 minutes",
        "short",
        {"engine {{engine}}": f"increase(servd:engine_restarts_total{OF}[15m])"},
    ),
    ("Preemptions per second", "short", {"preemptions": rate("vllm:num_preemptions_total")}),
    ("Tokens of a step", "short", quantiles("vllm:iteration_tokens_total")),
    (
        "Drafts: tokens for each step of a request",
        "short",
        {
            "mean": f"1 + {rate(f'{DRAFTS}_accepted_tokens_total')} / "
            f"{rate(f'{DRAFTS}_drafts_total')}"
        },
    ),
    (
        "Drafts accepted, by position",
        "percentunit",
        {
            "{{position}}": f"{rate(f'{DRAFTS}_accepted_tokens_per_pos_total', 'position')} / "
            f"ignoring (position) group_left {rate(f'{DRAFTS}_drafts_total')}"
        },
    ),
    (
        "HTTP answers per second",
        "reqps",
        {
            "{{handler}} {{status}}": "sum by (handler, status) "
            "(rate(http_requests_total[$__rate_interval]))"
        },
    ),
    ("Lag of the API servers' event loops", "s", quantiles("servd:event_loop_lag_seconds")),
]


def board(title: str, panels: list[Panel]) -> str:
    """A board as Grafana reads it."""
    document = {
        "title": title,
        "uid": title.lower().replace(" ", "-"),
        "tags": ["servd"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable("model_name", "vllm:num_requests_running")]},
        "panels": [panel(number, *parts) for number, parts in enumerate(panels)],
    }
    return json.dumps(document, indent=1) + "\n"


def variable(label: str, metric: str) -> dict[str, Any]:
    """What may be chosen at the top of a board."""
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({metric}, {label})", "refId": label},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    """A graph over time, at its place."""
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": expression, "legendFormat": legend, "exemplar": True}
            for i, (legend, expression) in enumerate(queries.items())
        ],
    }


def boards() -> dict[str, str]:
    """Name of its file -> the board."""
    return {
        "serving.json": board("servd serving", SERVING),
        "engine.json": board("servd engine", ENGINE),
    }
