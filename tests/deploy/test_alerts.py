"""Prometheus reads the alerts of docker/, and they fire when they should."""

from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docker/alerts.yaml"


def test_each_alert_fires_at_its_threshold(promtool):
    result = promtool("test", "rules", str(Path(__file__).with_name("alerts.yaml")))
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_has_a_test():
    rules = msgspec.yaml.decode(ALERTS.read_bytes())["groups"][0]["rules"]
    cases = msgspec.yaml.decode(Path(__file__).with_name("alerts.yaml").read_bytes())["tests"]
    fired = {
        test_case["alertname"]
        for case in cases
        for test_case in case["alert_rule_test"]
        if test_case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules}


def test_prometheus_reads_its_configuration(promtool, tmp_path):
    config = (ROOT / "docker/prometheus.yaml").read_text()
    (tmp_path / "api_key").touch()
    (tmp_path / "alerts.yaml").write_bytes(ALERTS.read_bytes())
    copy = tmp_path / "prometheus.yaml"
    copy.write_text(config.replace("/etc/prometheus/api_key", str(tmp_path / "api_key")))
    result = promtool("check", "config", str(copy))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rules found" in result.stdout
