"""Files of a model that are odd: each is refused with a message, or read as nothing is wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError
from servd.checkpoint import hub, pooling, weight_files
from servd.config import Config
from servd.launch import find_and_resolve

DEEP = "[" * 200_000
TYPES = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in hub.DEMO_FOLDER.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    return tmp_path


def change(file: Path, **keys: Any) -> None:
    stated = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(stated | keys))


def start(folder: Path) -> pooling.PoolingSpec:
    """Read the files as a server does."""
    _, spec, _ = find_and_resolve(Config.load({"model": str(folder), "device": "cpu"}))
    Tokenizer.load(str(folder))
    return pooling.read(spec)


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("config.json", {"rms_norm_eps": 10**400}),
        ("config.json", {"head_dim": 10**400}),
        ("config.json", CLASSIFIER | {"id2label": ["x"]}),
        ("config.json", CLASSIFIER | {"num_labels": 10**9}),
        ("config.json", CLASSIFIER | {"num_labels": "x"}),
        ("config.json", CLASSIFIER | {"sentence_transformers": "x"}),
        ("generation_config.json", {"temperature": "\ud800"}),
        ("tokenizer_config.json", {"split_special_tokens": "x"}),
        ("tokenizer_config.json", {"extra_special_tokens": "abc"}),
    ],
)
def test_key_refused(folder: Path, file: str, keys: dict[str, Any]) -> None:
    change(folder / file, **keys)
    with pytest.raises(ConfigError, match=rf"{[*keys][-1]}|generation_config\.json"):
        start(folder)


@pytest.mark.parametrize("weights", ["x", [1]])
def test_weights_of_a_group(folder: Path, weights: Any) -> None:
    group = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
    change(folder / "config.json", quantization_config=group)
    with pytest.raises(ConfigError, match=r"a\.weights"):
        start(folder)


@pytest.mark.parametrize("key", ["text_config", "transformer_layer_config"])
def test_part_that_is_no_object(folder: Path, key: str) -> None:
    change(folder / "config.json", **{key: [1]})
    with pytest.raises(ConfigError, match=key):
        start(folder)
    change(folder / "config.json", model_type="qwen2_5_vl", vision_config={})
    with pytest.raises(ConfigError, match=key):
        start(folder)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "modules.json"]
)
@pytest.mark.parametrize("text", [DEEP, None])
def test_broken_file(folder: Path, file: str, text: str | None) -> None:
    """None: a folder of this name."""
    (folder / file).unlink(missing_ok=True)
    if text is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=file):
        start(folder)


def test_added_token_without_id(folder: Path) -> None:
    file = folder / "tokenizer.json"
    stated = json.loads(file.read_text())
    del stated["added_tokens"][0]["id"]
    file.write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="id"):
        start(folder)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd"])
def test_names_that_lead_out(folder: Path, path: str) -> None:
    modules = [TYPES[0], TYPES[1] | {"path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=path):
        start(folder)
    index = weight_files.index_of(folder)
    index.write_text(json.dumps({"weight_map": {"a": f"{path}.safetensors"}}))
    with pytest.raises(ConfigError, match=path):
        weight_files.find_weight_files(folder)


def test_infinite_limit(folder: Path) -> None:
    (folder / "modules.json").write_text(json.dumps(TYPES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    change(folder / "tokenizer_config.json", model_max_length=float("inf"))
    assert start(folder).max_tokens == 2048
