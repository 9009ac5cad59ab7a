"""`servd check`: each thing that can be wrong has a line of its own, with what to do."""

import json
import logging
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from servd import cli
from servd.base.cards import CARDS
from servd.checkpoint.hub import DEMO_FOLDER
from servd.cli.check import check_device, check_hub
from servd.config import Config
from servd.config.machine import Machine
from servd.worker.ops import target
from tests.adapters import write_adapter

Findings = dict[str, dict[str, str]]


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """The command silences servd's log for the rest of its process."""
    logger = logging.getLogger("servd")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def check(capsys, monkeypatch) -> Callable[..., tuple[int, Findings]]:
    """Runs the command; exit code, and findings by name."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*args: str) -> tuple[int, Findings]:
        with pytest.raises(SystemExit) as end:
            cli.main(["check", *args, "--json"])
        findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert isinstance(end.value.code, int)
        assert end.value.code == any(f["status"] == "failed" for f in findings.values())
        assert all(f["status"] == "ok" or f.get("remedy") or f["text"] for f in findings.values())
        return end.value.code, findings

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model folder."""
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def test_the_account_of_config_json(check, model):
    config = json.loads((model / "config.json").read_text())
    code, findings = check(str(model))
    used, ignored = findings["config.json"]["text"].split(";")
    assert code == 0
    assert "rms_norm_eps" in used
    assert "initializer_range" in ignored
    (model / "config.json").write_text(json.dumps(config | {"new_gate": 2}))
    code, findings = check(str(model))
    assert (code, findings["config.json"]["status"]) == (1, "failed")
    assert "new_gate (2)" in findings["config.json"]["text"]
    code, findings = check(str(model), "--allow-unknown-keys")
    assert (code, findings["config.json"]["status"]) == (0, "warning")


def test_a_whole_folder(check, model):
    code, findings = check(str(model))
    assert code == 0
    for name in ("model", "tokenizer", "chat template", "weights", "hub", "GPU"):
        assert findings[name]["status"] == "ok", findings[name]
    assert "all tensors are there" in findings["weights"]["text"]


def test_the_account_of_an_adapter(check, model, tmp_path):
    adapter = write_adapter(tmp_path / "a", new_gate=2)
    options = (str(model), "--enable-lora", "--lora-modules", f"a={adapter}")
    findings = check(*options)[1]
    [status] = [f["status"] for f in findings.values() if "new_gate (2)" in f["text"]]
    assert status == "failed"
    assert "No such file" in check(*options[:-1], f"a={tmp_path}/none")[1]["a"]["text"]


def test_a_tokenizer_with_more_tokens_than_the_model(check, model):
    (model / "added_tokens.json").write_text(json.dumps({"<x>": 4000}))
    code, findings = check(str(model))
    assert (code, findings["tokenizer"]["status"]) == (0, "warning")
    assert findings["tokenizer"]["text"] == "4001 tokens, and 4000 of the model"


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_a_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba9"}))


@pytest.mark.parametrize(
    ("spoil", "name", "says"),
    [
        (no_weights, "weights", "no .safetensors file"),
        (half_a_file, "weights", "cannot be read"),
        (a_missing_shard, "weights", "lacks 1 of 2 weight files: model-2.safetensors"),
        (no_tokenizer, "tokenizer", "no tokenizer.json"),
        (another_architecture, "weights", "transformers does not build it"),
    ],
)
def test_an_incomplete_folder(check, model, spoil, name, says):
    spoil(model)
    code, findings = check(str(model))
    assert code == 1
    assert findings[name]["status"] == "failed" and says in findings[name]["text"]


def test_a_damaged_gguf_file(check, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    code, findings = check(str(file))
    assert code == 1
    assert findings["model"]["status"] == "failed" and str(file) in findings["model"]["text"]


def test_no_chat_template(check, model):
    for file in model.glob("chat_template*"):
        file.unlink()
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    code, findings = check(str(model))
    assert code == 0
    assert findings["chat template"]["status"] == "warning"
    assert "--chat-template" in findings["chat template"]["remedy"]


def test_a_model_that_does_not_fit(check, model):
    code, findings = check(str(model), "--kv-cache-memory", "1MiB", "--max-model-len", "2000")
    assert code == 1 and "lower --max-model-len" in findings["weights"]["remedy"]


def test_a_cache_that_cannot_be_written(check, monkeypatch):
    monkeypatch.setenv("HF_HOME", "/dev/null/cache")
    code, findings = check()
    assert code == 1
    assert findings["models"]["status"] == "failed" and "HF_HOME" in findings["models"]["remedy"]


def test_limits_of_the_system(check, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    monkeypatch.setattr(
        "servd.cli.check.look_at_machine",
        lambda: SimpleNamespace(num_gpus=2, torch_has_cuda=False, has_triton=False),
    )
    sizes = SimpleNamespace(total=64 << 20, free=1 << 20)
    monkeypatch.setattr("servd.cli.check.shutil.disk_usage", lambda _: sizes)
    monkeypatch.setattr("servd.worker.device.device.available_memory", lambda: 1 << 20)
    monkeypatch.setattr("servd.worker.device.device.cpu_quota", lambda: 0.5)
    monkeypatch.setattr("servd.worker.ops.native.library", lambda: None)
    _, findings = check("--tensor-parallel-size", "2")
    hints = {
        "models": "make room",
        "open files": "nofile=4160",
        "locked memory": "memlock",
        "memory": "container's limit",
        "CPUs": "quota",
        "shared memory": "--shm-size",
        "GPU": "CUDA build",
        "CPU kernels": "install servd again",
    }
    for name, hint in hints.items():
        finding = findings[name]
        assert finding["status"] == "warning" and hint in finding["remedy"], finding


def test_what_a_gpu_can_run(monkeypatch):
    machine = Machine(num_gpus=1, torch_has_cuda=True)
    monkeypatch.setattr("servd.cli.check.look_at_machine", lambda: machine)
    texts = {}
    for name in ("a100", "l40s", "h100"):
        with target.assume(CARDS[name]):
            findings = {x.name: x.text for x in check_device(Config())}
            texts[name] = findings["GPU kernels"]
    assert "fp8" not in texts["a100"] and "packed weights" in texts["a100"]
    assert "keys and values in fp8" in texts["l40s"] and "products in fp8" in texts["h100"]


@pytest.mark.parametrize("answers", [True, False])
def test_the_hub(monkeypatch, answers):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not answers:
            listener.close()
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("urllib.request.getproxies", dict)
        [hub] = check_hub(Config.load({"model": "org/name"}))
        [local] = check_hub(Config.load({"model": "demo"}))
    assert hub.status == ("ok" if answers else "warning")
    assert "not asked" in local.text
