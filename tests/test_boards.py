"""Boards and alerts ask for what servd exports, and compose starts what they need."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

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
OF_PROMETHEUS = {"up": {"job": {"servd"}, "instance": set[str]()}}


async def exposition() -> str:
    """That of a server which has answered, and drafted."""
    async with serve() as served:
        body = {"prompt": "a", "max_tokens": 2}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        stats = SchedulerStats(drafts=DraftStats(1, 2, 1, [1]))
        served.async_llm.metrics.observe_step(stats)
        return (await served.http.get("/metrics")).text


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """Labels of all samples with their values, by the name of the sample."""
    samples: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(asyncio.run(exposition())):
        for sample in family.samples:
            labels = samples.setdefault(sample.name, {label: set() for label in OF_SCRAPES})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return samples


def problems(query: str, exported: dict[str, dict[str, set[str]]]) -> list[str]:
    """What a query asks for that is not there; Prometheus can read the query."""
    promql_parser.parse(re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "5m")))
    messages, labels = [], set()
    for name, matchers in re.findall(r"(\w+:\w+|\w+(?=[{[]))(?:\{(.*?)\})?", query):
        if name not in exported:
            messages.append(f"no metric {name}")
            continue
        labels |= exported[name].keys()
        for label, operator, value in re.findall(r'(\w+)\s*([=!~]+)\s*"(.*?)"', matchers):
            if label not in exported[name]:
                messages.append(f"{name} has no label {label}")
            elif operator == "=" and value not in exported[name][label]:
                messages.append(f"{name} never has {label}={value}")
    for grouped in re.findall(r"by \((.*?)\)", query):
        messages += [f"no label {label}" for label in {*grouped.split(", ")} - labels]
    return messages


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_boards_ask_for_what_is_exported(board: Path, exported):
    content = json.loads(board.read_text())
    queries = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    assert len(queries) > 8
    assert {query: messages for query in queries if (messages := problems(query, exported))} == {}
    for variable in content["templating"]["list"]:
        name, label = re.findall(r"label_values\((.*), (.*)\)", variable["query"]["query"])[0]
        assert label in exported[name]


def test_alerts_ask_for_what_is_exported(exported):
    by_alert = {
        rule["alert"]: problems(rule["expr"], exported | OF_PROMETHEUS)
        for rule in read(DOCKER / "alerts.yaml")["groups"][0]["rules"]
    }
    assert {alert: messages for alert, messages in by_alert.items() if messages} == {}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("sum(rate(vllm:prompt_tokens[5m]))", "no metric"),
        ("sum by (pod) (vllm:num_requests_running)", "no label pod"),
        ('vllm:engine_sleep_state{sleep_state="on"}', "never has sleep_state=on"),
        ('vllm:num_requests_running{reason="x"}', "has no label reason"),
    ],
)
def test_a_wrong_query_is_found(query: str, problem: str, exported):
    assert any(problem in message for message in problems(query, exported))


def read(path: Path) -> Any:
    return msgspec.yaml.decode(path.read_bytes())


def test_compose_starts_the_monitoring():
    """Files, names of services and of the data source, and ports fit together."""
    compose = read(DOCKER / "compose.yaml")
    services, configs = compose["services"], compose["configs"]
    assert services["grafana"]["depends_on"] == ["prometheus"]  # `up cuda grafana` starts both
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        for config in services[name]["configs"]:
            source = configs[config["source"]]
            assert "content" in source or (DOCKER / source["file"]).exists()
    prometheus = read(DOCKER / "prometheus.yaml")
    [job] = prometheus["scrape_configs"]
    targets = {config["target"] for config in services["prometheus"]["configs"]}
    assert job["authorization"]["credentials_file"] in targets
    assert {f"/etc/prometheus/{name}" for name in prometheus["rule_files"]} <= targets
    [servers] = job["dns_sd_configs"]
    assert set(servers["names"]) == {"cpu", "cuda"} <= set(services) and servers["port"] == 8000
    [source] = read(DOCKER / "grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = read(DOCKER / "grafana/boards.yaml")["providers"]
    [volume] = services["grafana"]["volumes"]
    assert volume.split(":")[:2] == ["./grafana/boards", provider["options"]["path"]]
    for board in BOARDS:
        assert f'"uid": "{source["uid"]}"' in board.read_text()


def test_compose_lets_nobody_in_from_outside_unless_asked():
    services = read(DOCKER / "compose.yaml")["services"]
    ports = [
        port for name in services if name != "caddy" for port in services[name].get("ports", [])
    ]
    assert len(ports) == 3
    assert all(port.startswith(("${BIND:-127.0.0.1}:", "127.0.0.1:")) for port in ports)


def test_compose_puts_caddy_in_front():
    """Caddy's file leads to a name that the server has, and knows the domain."""
    compose = read(DOCKER / "compose.yaml")
    caddy, caddyfile = compose["services"]["caddy"], (DOCKER / "Caddyfile").read_text()
    [config] = caddy["configs"]
    assert compose["configs"][config["source"]]["file"] == "Caddyfile"
    [name] = re.findall(r"UPSTREAM:(\w+):8000", caddyfile)
    for server in ("cpu", "cuda"):
        assert name in compose["services"][server]["networks"]["default"]["aliases"]
    assert "{$DOMAIN:" in caddyfile and "DOMAIN" in caddy["environment"]
