"""Monitoring: what the boards ask for is what servd exports, and compose starts what they need."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from servd.messages.stats import DraftStats, SchedulerStats
from tests.api.harness import serve

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
BOARDS = sorted(DOCKER.glob("grafana/boards/*.json"))
OF_SCRAPES = {"job", "instance"}  # labels that Prometheus adds
EQUAL = promql_parser.MatchOp.Equal
RATES = {"rate", "irate", "increase"}


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
