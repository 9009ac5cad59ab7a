"""Monitoring: what the boards ask for is what servd exports, and compose starts what they need."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from servd.stats import DraftStats, SchedulerStats
from tests.api.harness import serve

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
BOARDS = sorted(DOCKER.glob("grafana/boards/*.json"))
OF_SCRAPES = {"job", "instance"}  # labels that Prometheus adds
EQUAL = promql_parser.MatchOp.Equal
RATES = {"rate", "irate", "increase"}
CHOSEN = 'job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"'
# The forms that queries of vLLM's published boards have, and the metrics that each of them is asked
# for: the names are those of all boards, the forms were read in the first parts of four of them (kv
# cache, service status, speculative decoding, query statistics). C stands for CHOSEN, M for the
# metric.
OF_PUBLISHED_BOARDS = {
    "histogram_quantile(0.95, sum by (le, model_name) (rate(M_bucket{C}[$__rate_interval])))": [
        "vllm:e2e_request_latency_seconds", "vllm:inter_token_latency_seconds",
        "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds",
        "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
        "vllm:request_inference_time_seconds", "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
        "vllm:request_params_max_tokens", "vllm:request_params_n",
        "vllm:request_max_num_generation_tokens", "vllm:request_num_preemptions",
        "vllm:request_prefill_kv_computed_tokens", "vllm:iteration_tokens_total",
        "vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds",
        "vllm:kv_block_reuse_gap_seconds",
    ],
    "sum(increase(M_bucket{C}[$__rate_interval])) by (le)": [
        "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    ],
    "sum(rate(M_sum{C}[$__rate_interval])) / (sum(rate(M_count{C}[$__rate_interval])) > 0)": [
        "vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds",
        "vllm:request_decode_time_seconds", "vllm:request_prefill_time_seconds",
        "vllm:request_queue_time_seconds", "vllm:request_max_num_generation_tokens",
    ],
    "sum by (model_name) (rate(M_total{C}[$__rate_interval]))": [
        "vllm:generation_tokens", "vllm:prompt_tokens", "vllm:prompt_tokens_cached",
        "vllm:num_preemptions", "vllm:request_success", "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
        "vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "vllm:external_prefix_cache_hits",
        "vllm:external_prefix_cache_queries", "vllm:kv_offload_load_bytes",
        "vllm:kv_offload_store_bytes", "vllm:kv_offload_stores_skipped",
        "vllm:corrupted_requests",
    ],
    "max by (instance, engine) (M{C})": [
        "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting",
        "vllm:kv_offload_cpu_cache_usage_perc",
    ],
    "sum(rate(vllm:generation_tokens_total{C}[5m])) / (sum(avg_over_time(M{C}[5m])) > 0)"
    " and on () count(M{C})": ["vllm:num_requests_running"],
    "sum(M{C, reason=\"capacity\"}) + sum(M{C, reason=\"deferred\"})": [
        "vllm:num_requests_waiting_by_reason",
    ],
    "sum by (stage) (M{C, stage=\"in_progress\"})": ["vllm:num_requests_kv_fetch_by_stage"],
    "sum by (finished_reason) (increase(M_total{C, finished_reason=\"error\"}[5m]))": [
        "vllm:request_success",
    ],
    "sum by (reason) (rate(M_total{C}[5m]))": ["vllm:admission_rejections"],
    "sum by (source) (rate(M_total{C}[5m]))": [
        "vllm:prompt_tokens_by_source", "vllm:prompt_tokens_cached_by_source",
    ],
    "sum by (position) (rate(M_total{C}[5m])) / on () group_left () "
    "(sum(rate(vllm:spec_decode_num_drafts_total{C}[5m])) > 0)": [
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    ],
    "(2 - (max(M{C, sleep_state=\"awake\"}) == bool 0)) or vector(0)": ["vllm:engine_sleep_state"],
    "max by (block_size, cache_dtype, num_gpu_blocks, kv_cache_size_tokens) (M{C})": [
        "vllm:cache_config_info",
    ],
    "sum by (operation) (M)": ["vllm:sleep_mode_operations_in_flight"],
    "histogram_quantile(0.9, sum by (le, operation) (rate(M_bucket[5m])))": [
        "vllm:sleep_mode_operation_duration_seconds",
    ],
    "sum by (handler, status) (rate(M_total{status=~\"5..\"}[5m]))": ["http_requests"],
    "histogram_quantile(0.9, sum by (le, handler) (rate(M_bucket[5m])))": [
        "http_request_duration_seconds",
    ],
}  # fmt: skip
PUBLISHED = [
    form.replace("{C", f"{{{CHOSEN}").replace("M", metric)
    for form, metrics in OF_PUBLISHED_BOARDS.items()
    for metric in metrics
]


class Exported(NamedTuple):
    """What is known of the samples of a name."""

    kind: str  # of its family
    labels: dict[str, set[str]]  # with their values


async def exposition() -> str:
    """That of a server which has answered, and drafted."""
    async with serve() as served:
        body = {"prompt": "a", "max_tokens": 2}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        stats = SchedulerStats(drafts=DraftStats(1, 2, 1, [1]))
        served.async_llm.metrics.observe_step(stats)
        return (await served.http.get("/metrics")).text


@pytest.fixture(scope="module")
def exported() -> dict[str, Exported]:
    """All samples, by name."""
    found: dict[str, Exported] = {}
    for family in text_string_to_metric_families(asyncio.run(exposition())):
        for sample in family.samples:
            labels = found.setdefault(sample.name, Exported(family.type, {})).labels
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def filled(query: str) -> str:
    """With values for Grafana's variables."""
    return re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "5m"))


class Reader:
    """Looks for what a query asks for that is not there, or cannot be computed of what is there."""

    def __init__(self, exported: dict[str, Exported]) -> None:
        self.exported = exported
        self.problems: list[str] = []

    def labels(self, node: Any, function: str = "") -> set[str]:
        """Those that the result of an expression may have; `function` is the one around it."""
        match node:
            case promql_parser.VectorSelector():
                return self.selected(node, function)
            case promql_parser.MatrixSelector():
                return self.selected(node.vector_selector, function)
            case promql_parser.AggregateExpr():
                known = self.labels(node.expr)
                by = {*node.modifier.labels} if node.modifier else set()
                self.problems += [f"no label {each}" for each in by - known]
                return by
            case promql_parser.Call(func=called, args=[*_, last]):
                known = self.labels(last, called.name)
                if called.name == "histogram_quantile" and "le" not in known:
                    self.problems.append("a quantile without le")
                return known
            case promql_parser.BinaryExpr():
                return self.labels(node.lhs) | self.labels(node.rhs)
            case promql_parser.ParenExpr():
                return self.labels(node.expr, function)
        return set()

    def selected(self, node: Any, function: str) -> set[str]:
        name, sample = node.name, self.exported.get(node.name)
        if sample is None:
            self.problems.append(f"no metric {name}")
            return set()
        if (sample.kind in ("counter", "histogram")) != (function in RATES):
            self.problems.append(f"{function or 'the value'} of {name}, a {sample.kind}")
        for each in node.matchers.matchers:
            if each.name in OF_SCRAPES:
                continue
            if each.name not in sample.labels:
                self.problems.append(f"{name} has no label {each.name}")
            elif each.op == EQUAL and each.value not in sample.labels[each.name]:
                self.problems.append(f"{name} never has {each.name}={each.value}")
        return sample.labels.keys() | OF_SCRAPES


def problems(query: str, exported: dict[str, Exported]) -> list[str]:
    reader = Reader(exported)
    reader.labels(promql_parser.parse(filled(query)))
    return reader.problems


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_boards_ask_for_what_is_exported(board: Path, exported: dict[str, Exported]):
    content = json.loads(board.read_text())
    asked = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    assert len(asked) > 8
    assert {query: found for query in asked if (found := problems(query, exported))} == {}
    for variable in content["templating"]["list"]:
        name, label = re.findall(r"label_values\((.*), (.*)\)", variable["query"]["query"])[0]
        assert label in exported[name].labels


def test_published_boards_work(exported: dict[str, Exported]):
    assert len(PUBLISHED) > 60
    assert {query: found for query in PUBLISHED if (found := problems(query, exported))} == {}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("sum(rate(vllm:prompt_tokens[5m]))", "no metric"),
        ("sum(vllm:prompt_tokens_total)", "the value of vllm:prompt_tokens_total, a counter"),
        ("rate(vllm:num_requests_running[5m])", "rate of vllm:num_requests_running, a gauge"),
        ("avg_over_time(vllm:prompt_tokens_total[5m])", "avg_over_time of"),
        ("sum by (pod) (vllm:num_requests_running)", "no label pod"),
        ('vllm:engine_sleep_state{sleep_state="on"}', "never has sleep_state=on"),
        ('vllm:num_requests_running{reason="x"}', "has no label reason"),
        (
            "histogram_quantile(0.9, sum(rate(vllm:request_prompt_tokens_bucket[5m])))",
            "a quantile without le",
        ),
    ],
)
def test_a_wrong_query_is_found(query: str, problem: str, exported: dict[str, Exported]):
    assert any(problem in each for each in problems(query, exported))


def test_what_is_no_query_is_found():
    with pytest.raises(ValueError, match="invalid"):
        promql_parser.parse("sum by (rate(a[5m]))")


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
