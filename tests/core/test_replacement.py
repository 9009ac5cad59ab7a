"""Which checkpoints `update_weights` accepts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from servd.base.errors import InvalidRequest
from servd.checkpoint.model_spec import ModelSpec, read_spec
from servd.config.model import ModelConfig
from servd.core.replacement import find_replacement

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 4096,
}


def checkpoint(folder: Path, names: str = "ab", size: int = 2, dtype: str = "F32") -> Path:
    """Write a checkpoint with tensors of these names."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for i, name in enumerate(names):
        offsets = [4 * size * i, 4 * size * (i + 1)]
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = bytes(4 * size * len(names))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_spec(checkpoint(tmp_path / "models" / "first"))


def find(folder: Path | str, spec: ModelSpec, **options: Any) -> ModelSpec:
    return find_replacement(str(folder), spec, ModelConfig(**options))


def test_a_checkpoint_beside_the_model_is_accepted(tmp_path: Path, spec: ModelSpec):
    second = checkpoint(tmp_path / "models" / "second")
    (tmp_path / "link").symlink_to(second)
    for folder in (second, tmp_path / "link"):
        assert find(folder, spec).folder == str(second)
    (second / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "gelu"}))
    with pytest.raises(InvalidRequest, match="second/config.json has hidden_act 'gelu'"):
        find(second, spec)


def test_a_named_pipe_is_not_opened(tmp_path: Path, spec: ModelSpec):
    second = checkpoint(tmp_path / "models" / "second")
    (second / "config.json").unlink()
    os.mkfifo(second / "config.json")
    with pytest.raises(InvalidRequest, match="config.json is no regular file"):
        find(second, spec)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"names": "a"}, r"tensor b is absent, and in the model that is served F32 \[2\]"),
        ({"names": "abc"}, r"tensor c is F32 \[2\], and in the model that is served absent"),
        ({"size": 3}, r"tensor a is F32 \[3\], and .* F32 \[2\]"),
        ({"dtype": "I32"}, r"tensor a is I32 \[2\], and .* F32 \[2\]"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, spec: ModelSpec, options: Any, reason: str):
    with pytest.raises(InvalidRequest, match=reason):
        find(checkpoint(tmp_path / "models" / "second", **options), spec)


@pytest.mark.parametrize("num_bytes", [0, 5, 20, -1])
def test_half_written_files_are_refused(tmp_path: Path, spec: ModelSpec, num_bytes: int):
    weights = checkpoint(tmp_path / "models" / "second") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    with pytest.raises(InvalidRequest, match="is incomplete|its header says"):
        find(weights.parent, spec)


def test_folders_elsewhere_are_refused_alike(tmp_path: Path, spec: ModelSpec):
    outside = checkpoint(tmp_path / "other" / "second")
    (tmp_path / "models" / "link").symlink_to(outside)
    inside = checkpoint(tmp_path / "models" / "deeper" / "second")
    places = [outside, tmp_path / "models" / "link", inside, tmp_path / "none", "/", "", "a\0b"]
    reasons = set()
    for place in places:
        with pytest.raises(InvalidRequest) as refusal:
            find(place, spec)
        reasons.add(str(refusal.value))
    assert reasons == {"update_weights reads only folders beside the model's own folder"}


def test_what_is_not_safetensors_is_refused(tmp_path: Path, spec: ModelSpec):
    second = checkpoint(tmp_path / "models" / "second")
    with pytest.raises(InvalidRequest, match="--load-format dummy"):
        find(second, spec, load_format="dummy")
    for folder in (second, Path(spec.folder)):
        (folder / "pytorch_model.bin").touch()
    with pytest.raises(InvalidRequest, match="only safetensors"):
        find(second, spec, load_format="pt")
