"""Monitoring: what the boards ask for is what servd exports, and compose starts what they need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import promql_parser
import pytest

from servd.api.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
BOARDS = sorted(DOCKER.glob("grafana/boards/*.json"))
OWN_LABELS = {
    "finished_reason", "reason", "le", "position", "handler", "status", "engine", "model_name",
}  # fmt: skip
# What vLLM's published boards read: they can be loaded unchanged.
OF_PUBLISHED_BOARDS = [
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum", "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason", "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total", "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_by_source_total",
    "vllm:request_decode_time_seconds_sum", "vllm:request_generation_tokens_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_max_num_generation_tokens_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket", "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total", "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_drafts_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_sum",
    "vllm:cache_config_info", "vllm:iteration_tokens_total_bucket", "http_requests_total",
    "http_request_duration_seconds_bucket",
]  # fmt: skip


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of all samples that servd may export."""
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return {
        family.name + ending
        for family in Metrics("m").registry.collect()
        for ending in endings.get(family.type, [""])
    }


def expressions(board: Path) -> list[str]:
    """Its queries, with values for Grafana's variables."""
    panels = json.loads(board.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [e.replace("$__rate_interval", "5m").replace("$model_name", ".*") for e in found]


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_boards_ask_for_what_is_exported(board: Path, exported: set[str]):
    asked = expressions(board)
    assert len(asked) > 8
    for expression in asked:
        promql_parser.parse(expression)
        names = set(re.findall(r"\b(?:vllm|servd|http)[:_][a-z0-9_:]+", expression))
        assert names and names <= exported, expression
        labels = re.findall(r"(?:by|ignoring) \(([a-z_, ]+)\)", expression)
        assert {label for part in labels for label in part.split(", ")} <= OWN_LABELS


def test_a_wrong_query_is_found():
    with pytest.raises(ValueError, match="invalid"):
        promql_parser.parse("sum by (rate(a[5m]))")


def test_published_boards_find_their_names(exported: set[str]):
    assert sorted(set(OF_PUBLISHED_BOARDS) - exported) == []


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_panels_do_not_overlap(board: Path):
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(board.read_text())["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells and at["x"] + at["w"] <= 24
        cells |= own


def read(path: Path) -> Any:
    return msgspec.yaml.decode(path.read_bytes())


def test_compose_starts_the_monitoring():
    """Files, names of services and of the data source, and ports fit together."""
    compose = read(DOCKER / "compose.yaml")
    services, configs = compose["services"], compose["configs"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        for config in services[name]["configs"]:
            source = configs[config["source"]]
            assert "content" in source or (DOCKER / source["file"]).exists()
    [job] = read(DOCKER / "prometheus.yaml")["scrape_configs"]
    targets = {config["target"] for config in services["prometheus"]["configs"]}
    assert job["authorization"]["credentials_file"] in targets
    [servers] = job["dns_sd_configs"]
    assert set(servers["names"]) == {"cpu", "cuda"} <= set(services) and servers["port"] == 8000
    [source] = read(DOCKER / "grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = read(DOCKER / "grafana/boards.yaml")["providers"]
    [volume] = services["grafana"]["volumes"]
    assert volume.split(":")[:2] == ["./grafana/boards", provider["options"]["path"]]
    for board in BOARDS:
        assert f'"uid": "{source["uid"]}"' in board.read_text()
