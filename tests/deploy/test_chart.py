"""The chart with each option and without, against the schemas of Kubernetes and servd's options."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from referencing import Registry, Resource

from servd.base.errors import ConfigError
from servd.config import Config
from servd.terminal.engine_flags import read_config_file
from tests.deploy.conftest import TOOLS, Run

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docker/helm/servd"
SCHEMAS = TOOLS / "schemas/kubernetes_validate/kubernetes-json-schema"
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}  # no schema of Kubernetes
VERSIONS = ["1.27", "1.37"]  # the oldest that the chart allows, and the newest with schemas

# What a user may set -> the kinds of objects that come and go with it.
OPTIONS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "nothing": ({}, set(), set()),
    "StatefulSet": ({"kind": "StatefulSet"}, {"StatefulSet"}, {"Deployment"}),
    "StatefulSet with volumes": (
        {"kind": "StatefulSet", "pvcStorage": "9Gi", "replicaCount": 3},
        {"StatefulSet", "PodDisruptionBudget"},
        {"Deployment"},
    ),
    "PVC": ({"pvcStorage": "9Gi", "storageClass": "fast"}, {"PersistentVolumeClaim"}, set()),
    "PVC of yours": ({"pvcStorage": "9Gi", "existingClaim": "models"}, set(), set()),
    "replicas": ({"replicaCount": 2}, {"PodDisruptionBudget"}, set()),
    "replicas without PDB": ({"replicaCount": 2, "pdb": {"enabled": False}}, set(), set()),
    "API key": ({"apiKey": "k-0123456789"}, {"Secret"}, set()),
    "key file": ({"apiKeyFile": '[[keys]]\nname = "a"\nsha256 = "b"\n'}, {"Secret"}, set()),
    "HF token": ({"hf_token": "hf_x"}, {"Secret"}, set()),
    "Secret of yours": (
        {"existingSecret": "mine", "existingSecretKeys": ["api-key", "keys.toml", "hf-token"]},
        set(),
        set(),
    ),
    "GPU": ({"requestGPU": 1, "tag": "cuda", "runtimeClassName": "nvidia"}, set(), set()),
    "GPUs": ({"requestGPU": 2, "servdConfig": {"tensor-parallel-size": 2}}, set(), set()),
    "ingress": (
        {"ingress": {"enabled": True, "host": "llm.example.com", "tlsSecret": "cert"}},
        {"Ingress"},
        set(),
    ),
    "network policy": ({"networkPolicy": {"enabled": True}}, {"NetworkPolicy"}, set()),
    "HPA": (
        {"autoscaling": {"enabled": True}},
        {"HorizontalPodAutoscaler", "PodDisruptionBudget"},
        set(),
    ),
    "KEDA": ({"keda": {"enabled": True}}, {"ScaledObject", "PodDisruptionBudget"}, set()),
    "service monitor": ({"serviceMonitor": {"enabled": True}}, {"ServiceMonitor"}, set()),
    "alerts": ({"prometheusRule": {"enabled": True}}, {"PrometheusRule"}, set()),
    "boards": ({"grafanaDashboards": {"enabled": True}}, {"ConfigMap boards"}, set()),
    "pod": (
        {
            "env": [{"name": "FORWARDED_ALLOW_IPS", "value": "*"}],
            "extraArgs": ["--log-format", "json"],
            "extraVolumes": [{"name": "models", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"a": "b"},
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "priorityClassName": "high",
            "imagePullSecrets": [{"name": "registry"}],
            "strategy": {"type": "Recreate"},
            "limitCPU": 4,
        },
        set(),
        set(),
    ),
}
OPTIONS["everything"] = (
    {name: value for values, _, _ in OPTIONS.values() for name, value in values.items()}
    | {"existingSecret": "", "autoscaling": {"enabled": False}, "pdb": {"enabled": True}},
    {kind for _, added, _ in OPTIONS.values() for kind in added}
    - {"HorizontalPodAutoscaler", "PersistentVolumeClaim"},
    {"Deployment"},
)
BASIC = {"ConfigMap", "Service", "Deployment", "Pod"}
every_option = pytest.mark.parametrize("option", OPTIONS)


class Rendered:
    """The objects of a release."""

    def __init__(self, text: str) -> None:
        self.objects = [document for document in yaml.safe_load_all(text) if document]
        self.kinds: dict[str, Any] = {}
        for manifest in self.objects:
            kind = manifest["kind"]
            if kind == "ConfigMap" and manifest["metadata"]["name"].endswith("-boards"):
                kind += " boards"
            assert kind not in self.kinds
            self.kinds[kind] = manifest

    @property
    def workload(self) -> Any:
        return self.kinds.get("Deployment") or self.kinds["StatefulSet"]

    @property
    def pod(self) -> Any:
        return self.workload["spec"]["template"]["spec"]

    @property
    def container(self) -> Any:
        [container] = self.pod["containers"]
        return container

    @property
    def volumes(self) -> dict[str, Any]:
        return {volume["name"]: volume for volume in self.pod["volumes"]}

    @property
    def config(self) -> str:
        return self.kinds["ConfigMap"]["data"]["servd.yaml"]


def render(helm: Run, values: dict[str, Any]) -> Rendered:
    """Return the objects of a release with some values, `r` in the namespace `llm`."""
    arguments = ("template", "r", str(CHART), "--namespace", "llm", "--values", "-")
    result = helm(*arguments, stdin=json.dumps(values))
    assert result.returncode == 0, result.stderr
    return Rendered(result.stdout)


def find_schema(manifest: dict[str, Any], version: str) -> jsonschema.Draft202012Validator:
    """Return Kubernetes' schema for an object, which allows no unknown field."""
    folder = SCHEMAS / f"v{version}.0-local-strict"
    if not folder.exists():
        pytest.skip("there are no schemas of Kubernetes: tests/deploy/install.sh downloads them")
    group, _, api_version = manifest["apiVersion"].rpartition("/")
    parts = [manifest["kind"].lower(), group.split(".")[0], api_version]
    name = "-".join(part for part in parts if part) + ".json"
    registry: Registry[Any] = Registry()
    for file in (folder / name, folder / "_definitions.json"):
        registry = Resource.from_contents(json.loads(file.read_text())) @ registry
    return jsonschema.Draft202012Validator(
        json.loads((folder / name).read_text()), registry=registry
    )


def test_the_chart_passes_lint(helm):
    result = helm("lint", "--strict", str(CHART))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_chart_can_be_packaged(helm, tmp_path):
    """With the boards and alerts, which are links in the tree."""
    assert helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    [package] = tmp_path.glob("servd-*.tgz")
    values = {"prometheusRule": {"enabled": True}, "grafanaDashboards": {"enabled": True}}
    result = helm("template", "r", str(package), "--values", "-", stdin=json.dumps(values))
    boards = Rendered(result.stdout).kinds["ConfigMap boards"]["data"]
    assert set(boards) == {"engine.json", "serving.json"}


@every_option
def test_an_option_makes_its_objects(helm, option):
    values, added, removed = OPTIONS[option]
    assert set(render(helm, values).kinds) == (BASIC | added) - removed


@pytest.mark.parametrize("version", VERSIONS)
@every_option
def test_objects_fit_the_schemas_of_kubernetes(helm, option, version):
    for manifest in render(helm, OPTIONS[option][0]).objects:
        if manifest["kind"] not in OF_OPERATORS:
            find_schema(manifest, version).validate(manifest)


def test_a_misspelt_field_does_not_fit_the_schema(helm):
    deployment = render(helm, {}).workload
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(jsonschema.ValidationError):
        find_schema(deployment, VERSIONS[-1]).validate(deployment)


@every_option
def test_servd_reads_the_configuration(helm, option, tmp_path):
    file = tmp_path / "servd.yaml"
    file.write_text(render(helm, OPTIONS[option][0]).config)
    config = Config.load(read_config_file(str(file)))
    assert config.server.host == "0.0.0.0" and config.server.port == 8000


@every_option
def test_a_pod_is_confined(helm, option):
    rendered = render(helm, OPTIONS[option][0])
    assert rendered.pod["securityContext"]["runAsNonRoot"]
    assert rendered.pod["automountServiceAccountToken"] is False
    assert rendered.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"] for mount in rendered.container["volumeMounts"]}
    assert {"/cache", "/home/servd", "/tmp"} <= mounted  # what the image writes to
    names = {mount["name"] for mount in rendered.container["volumeMounts"]}
    claimed = rendered.workload["spec"].get("volumeClaimTemplates", [])
    assert names == rendered.volumes.keys() | {claim["metadata"]["name"] for claim in claimed}


@every_option
def test_the_selectors_find_the_pod_alone(helm, option):
    rendered = render(helm, OPTIONS[option][0])
    labels = rendered.workload["spec"]["template"]["metadata"]["labels"]
    selectors = [rendered.kinds["Service"]["spec"]["selector"]]
    selectors.append(rendered.workload["spec"]["selector"]["matchLabels"])
    if policy := rendered.kinds.get("NetworkPolicy"):
        selectors.append(policy["spec"]["podSelector"]["matchLabels"])
    if budget := rendered.kinds.get("PodDisruptionBudget"):
        selectors.append(budget["spec"]["selector"]["matchLabels"])
    test_labels = rendered.kinds["Pod"]["metadata"]["labels"]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= test_labels.items()


@pytest.mark.parametrize(("pre_stop", "timeout"), [(5, 60), (0, 15), (30, 600)])
def test_a_pod_has_time_to_finish_requests(helm, pre_stop, timeout):
    rendered = render(helm, {"preStopSeconds": pre_stop, "shutdownTimeout": timeout})
    assert f"shutdown-timeout: {timeout}\n" in rendered.config
    assert rendered.pod["terminationGracePeriodSeconds"] == pre_stop + timeout + 15
    assert ("lifecycle" in rendered.container) == (pre_stop > 0)


def test_probes_allow_the_time_to_load(helm):
    container = render(helm, {"startupSeconds": 601}).container
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 601
    assert startup["httpGet"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert "tcpSocket" in container["livenessProbe"]


def test_options_reach_servd(helm):
    rendered = render(
        helm,
        {
            "modelURL": "Qwen/Qwen3-0.6B",
            "servdConfig": {"max-num-seqs": 32, "shutdown-timeout": 7},
            "extraArgs": ["--log-format", "json"],
        },
    )
    config = yaml.safe_load(rendered.config)
    assert config["model"] == "Qwen/Qwen3-0.6B" and config["max-num-seqs"] == 32
    assert config["shutdown-timeout"] == 7  # servdConfig over what the chart sets
    assert rendered.container["args"][-2:] == ["--log-format", "json"]


def test_a_changed_configuration_replaces_pods(helm):
    def checksum(values: dict[str, Any]) -> str:
        template = render(helm, values).workload["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"replicaCount": 2})
    assert checksum({}) != checksum({"servdConfig": {"max-num-seqs": 8}})


def test_keys_come_from_secrets(helm):
    ours = render(helm, {"apiKey": "k", "hf_token": "h", "apiKeyFile": "x = 1\n"})
    assert ours.kinds["Secret"]["stringData"] == {
        "api-key": "k",
        "hf-token": "h",
        "keys.toml": "x = 1\n",
    }
    keys = ["api-key", "hf-token", "keys.toml"]
    theirs = render(helm, {"existingSecret": "mine", "existingSecretKeys": keys})
    for rendered, secret in ((ours, "r-servd"), (theirs, "mine")):
        env = {variable["name"]: variable for variable in rendered.container["env"]}
        for variable, key in (("SERVD_API_KEY", "api-key"), ("HF_TOKEN", "hf-token")):
            source = env[variable]["valueFrom"]["secretKeyRef"]
            assert source == {"name": secret, "key": key}
        assert rendered.volumes["keys"]["secret"]["secretName"] == secret
        assert "api-key-file: /etc/servd/keys/keys.toml" in rendered.config
    plain = render(helm, {})
    assert [variable["name"] for variable in plain.container["env"]] == ["HF_HOME"]
    assert "keys" not in plain.volumes and "api-key-file" not in plain.config


def test_the_cache_is_kept_on_a_volume(helm):
    assert render(helm, {}).volumes["cache"] == {"name": "cache", "emptyDir": {}}
    ours = render(helm, {"pvcStorage": "9Gi", "storageClass": "fast"})
    claim = ours.kinds["PersistentVolumeClaim"]
    assert claim["spec"]["storageClassName"] == "fast"
    name = ours.volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert name == claim["metadata"]["name"]
    assert ours.workload["spec"]["strategy"] == {"type": "Recreate"}  # one node can mount it
    theirs = render(helm, {"existingClaim": "models"})
    assert theirs.volumes["cache"]["persistentVolumeClaim"]["claimName"] == "models"
    shared = render(helm, {"pvcStorage": "9Gi", "pvcAccessMode": ["ReadWriteMany"]})
    assert shared.workload["spec"]["strategy"]["type"] == "RollingUpdate"
    stateful = render(helm, {"pvcStorage": "9Gi", "kind": "StatefulSet"})
    [template] = stateful.workload["spec"]["volumeClaimTemplates"]
    assert template["metadata"]["name"] == "cache" and "cache" not in stateful.volumes


def test_gpus_are_limits_and_several_share_memory(helm):
    none = render(helm, {})
    assert "nvidia.com/gpu" not in none.container["resources"]["limits"]
    single = render(helm, {"requestGPU": 1})
    assert single.container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "shm" not in single.volumes
    two = render(helm, {"requestGPU": 2, "requestGPUType": "amd.com/gpu", "shmSize": "2Gi"})
    assert two.container["resources"]["limits"]["amd.com/gpu"] == 2
    assert two.volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


@pytest.mark.parametrize("scaler", ["autoscaling", "keda"])
def test_a_scaler_owns_the_number_of_replicas(helm, scaler):
    rendered = render(helm, {scaler: {"enabled": True}, "kind": "StatefulSet"})
    assert "replicas" not in rendered.workload["spec"]
    scaling = rendered.kinds[
        "HorizontalPodAutoscaler" if scaler == "autoscaling" else "ScaledObject"
    ]
    target = scaling["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "r-servd"}


def test_keda_counts_the_waiting_requests_of_its_release(helm):
    [trigger] = render(helm, {"keda": {"enabled": True}}).kinds["ScaledObject"]["spec"]["triggers"]
    query = 'sum(vllm:num_requests_waiting{namespace="llm", service="r-servd"})'
    assert trigger["metadata"]["query"] == query and trigger["metadata"]["threshold"] == "5"


def test_prometheus_finds_the_server_and_its_key(helm):
    plain = render(helm, {"serviceMonitor": {"enabled": True, "labels": {"release": "x"}}})
    monitor = plain.kinds["ServiceMonitor"]
    labels = plain.kinds["Service"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "servd"  # the job of the alerts
    assert monitor["metadata"]["labels"]["release"] == "x"
    assert "authorization" not in monitor["spec"]["endpoints"][0]
    keyed = render(helm, {"serviceMonitor": {"enabled": True}, "apiKey": "k"})
    [endpoint] = keyed.kinds["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "r-servd", "key": "api-key"}


def test_alerts_and_boards_are_those_of_compose(helm):
    values = {"prometheusRule": {"enabled": True}, "grafanaDashboards": {"enabled": True}}
    rendered = render(helm, values)
    alerts = msgspec.yaml.decode((ROOT / "docker/alerts.yaml").read_bytes())
    assert rendered.kinds["PrometheusRule"]["spec"] == alerts
    boards = rendered.kinds["ConfigMap boards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    for board in (ROOT / "docker/grafana/boards").glob("*.json"):
        assert json.loads(boards["data"][board.name]) == json.loads(board.read_text())


def test_the_network_policy_lets_in_what_is_named(helm):
    plain = render(helm, {"networkPolicy": {"enabled": True}}).kinds["NetworkPolicy"]["spec"]
    assert plain["ingress"][0]["from"] == [{"podSelector": {}}]
    assert {443, 53} == {port["port"] for port in plain["egress"][0]["ports"]}
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    closed = {"networkPolicy": {"enabled": True, "from": [peer], "allowHub": False}}
    spec = render(helm, closed).kinds["NetworkPolicy"]["spec"]
    assert spec["ingress"][0]["from"] == [peer] and spec["egress"] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "'replicas' not allowed"),
        ({"kind": "DaemonSet"}, "/kind"),
        ({"keda": {"enabled": True, "minReplicaCount": 0}}, "minReplicaCount"),
        ({"keda": {"enabled": True}, "autoscaling": {"enabled": True}}, "exclude each other"),
        ({"pvcStorage": "9Gi", "replicaCount": 2}, "ReadWriteMany"),
        ({"pvcStorage": "9Gi", "keda": {"enabled": True}}, "ReadWriteMany"),
        ({"ingress": {"enabled": True}}, "ingress.host is needed"),
        ({"servdConfig": {"max-num-seq": 8}}, "max-num-seq"),
        (
            {"apiKeyFile": "x", "serviceMonitor": {"enabled": True}},
            "serviceMonitor.authorizationSecret",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(helm, values, message):
    result = helm("template", "r", str(CHART), "--values", "-", stdin=json.dumps(values))
    assert result.returncode != 0 and message in result.stderr


def test_the_defaults_fit_the_schema_of_values():
    """Without helm; and each value that the schema knows has a default with a meaning."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(values)
    assert schema["properties"].keys() - {"global"} == values.keys()


def test_typos_in_the_options_of_servd_are_refused():
    """Without helm. servd itself takes each of the other names."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    fine = {"max-num-seqs": 8, "max_model_len": "8k", "swap-space": 4, "disable-log-stats": True}
    validator.validate({"servdConfig": fine})
    Config.load({"model": "demo", **{name.replace("-", "_"): fine[name] for name in fine}})
    for typo in ("max-num-seq", "Max-Num-Seqs", "max-num-seqs ", "no-console"):
        (error,) = validator.iter_errors({"servdConfig": {typo: 8}})
        assert [*error.path] == ["servdConfig"] and f"'{typo}'" in error.message
        with pytest.raises(ConfigError, match="unknown option"):
            Config.load({"model": "demo", typo.replace("-", "_"): 8})


def test_the_version_is_that_of_servd():
    import servd

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == servd.__version__
