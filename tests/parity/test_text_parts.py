"""Models that see images too, served as models of text: logits and tokens of transformers."""

import json
import logging
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.checkpoint.multimodal_config import CLASSES, DEFAULTS, SAME
from tests.parity.families import GEMMA3, LFM2, LLAMA, QWEN3_MOE, QWEN3_NEXT
from tests.worker.driver import Driver, config_for

CLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP2 = CLIP | {"model_type": "siglip2_vision_model", "num_patches": 16}
QWEN_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 48}
QWEN3_EYES = QWEN_EYES | {
    "intermediate_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HEAD = LLAMA | {"head_dim": 16}
# model_type -> what is in its text_config, in its vision_config, and beside them.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (GEMMA3, CLIP, {"mm_tokens_per_image": 4}),
    "llava": (LLAMA | {"model_type": "llama"}, CLIP | {"model_type": "clip_vision_model"}, {}),
    "mistral3": (
        HEAD | {"model_type": "mistral", "sliding_window": None},
        CLIP | {"model_type": "pixtral", "head_dim": 16},
        {},
    ),
    "qwen2_vl": (
        LLAMA | {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}},
        {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 48},
        {},
    ),
    "qwen2_5_vl": (
        LLAMA | {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}},
        QWEN_EYES | {"intermediate_size": 32},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl": (HEAD | {"rope_parameters": MROPE}, QWEN3_EYES, {"tie_word_embeddings": True}),
    "qwen3_vl_moe": (
        # No square matrices: whether they are turned is seen by their shape.
        QWEN3_MOE | {"rope_parameters": MROPE, "moe_intermediate_size": 20, "norm_topk_prob": True},
        QWEN3_EYES,
        {},
    ),
    "lfm2_vl": (LFM2 | {"model_type": "lfm2"}, SIGLIP2, {}),
    "qwen3_5": (QWEN3_NEXT, QWEN3_EYES, {}),
    "qwen3_5_moe": (QWEN3_NEXT, QWEN3_EYES, {}),
}
NUM_OUTPUTS = 6


@cache
def whole_model(model_type: str) -> Any:
    import transformers

    text, vision, options_of_type = WHOLE[model_type]
    tokens = {f"{kind}_token_id": at for at, kind in enumerate(("image", "video"), 190)}
    options = {"text_config": text, "vision_config": vision} | tokens | options_of_type
    config = transformers.AutoConfig.for_model(model_type, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def check(folder: Path, model: Any, **options: object) -> None:
    driver = Driver(config_for(folder, **options))
    draw = random.Random(1)
    prompt = [draw.randrange(180) for _ in range(21)]
    slot = driver.add(prompt)
    driver.generate([slot], NUM_OUTPUTS, chunk=8)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([driver.tokens[slot]])).logits[0]
    expected = logits[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(driver.logits[slot]), expected, atol=1e-4, rtol=0)
    assert driver.tokens[slot][len(prompt) :] == expected.argmax(-1).tolist()


@pytest.mark.parametrize("model_type", WHOLE)
def test_text_of_a_model_that_sees(tmp_path, caplog, model_type):
    model = whole_model(model_type)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="servd.worker"):
        check(tmp_path, model, model_impl="servd")
    said = [record.getMessage() for record in caplog.records if "skipping" in record.getMessage()]
    assert len(said) == 1 and "servd reads text only" in said[0]
    assert "visual" in said[0] or "vision_tower" in said[0]


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_by_transformers(tmp_path: Path, model_type: str):
    model = whole_model(model_type)
    model.save_pretrained(tmp_path)
    check(tmp_path, model, model_impl="transformers")


@pytest.mark.parametrize(
    ("name", "is_part"),
    [
        ("model.vision_tower.text_model.layers.0.self_attn.q_proj.weight", True),
        ("audio_tower.language_model.norm.weight", True),
        ("model.multi_modal_projector.layers.0.mlp.up_proj.weight", True),
        ("model.qformer.layers.0.mlp.up_proj.weight", True),
        ("model.image_newline", True),
        ("model.language_model.layers.0.self_attn.gate.weight", False),
        ("model.language_model.adapters.0.weight", False),
        ("draft.language_model.layers.0.mlp.up_proj.weight", False),
        ("text_adapter.weight", False),
        ("model.layers.9.mlp.up_proj.weight", False),
    ],
)
def test_other_tensors_are_of_known_parts_or_refused(tmp_path: Path, name: str, is_part: bool):
    """They change no tensor of the language model whose name is inside of theirs."""
    model = whole_model("llava")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(4, 4)}, file, {"format": "pt"})
    if is_part:
        check(tmp_path, model)
        return
    with pytest.raises(ConfigError, match=re.escape(name.partition("language_model.")[2] or name)):
        check(tmp_path, model)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("qwen3_vl_moe", {"norm_topk_prob": False}),
        ("qwen3_vl_moe", {"num_experts_per_tok": None}),
        ("qwen3_vl_moe", {"rope_parameters": None}),
        ("qwen3_vl", {"rope_parameters": None}),
        ("qwen2_vl", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}),
        ("qwen2_5_vl", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}),
    ],
)
def test_keys_that_differ_from_those_of_the_text_model(tmp_path: Path, model_type: str, change):
    import transformers

    whole_model(model_type).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"] | change
    config["text_config"] = {key: value for key, value in text.items() if value is not None}
    file.write_text(json.dumps(config))
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    check(tmp_path, model.eval())


def test_as_qwen_published_version_2(tmp_path: Path):
    """Keys and weights of text beside the whole model's, and the rotation's older name."""
    model = whole_model("qwen2_5_vl")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    flat = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    flat |= {"rope_scaling": rope, "rope_theta": 1e4, "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(flat | config))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {name.partition(".")[0] for name in names} == {"model", "visual"}  # as it did
    check(tmp_path, model)


def test_as_qwen_published_version_3_with_experts(tmp_path: Path):
    """Their matrices are turned."""
    model = whole_model("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if "experts" in name}
    assert turned
    save_file(tensors | turned, file)
    check(tmp_path, model)


def test_classes_are_those_of_the_files():
    for model_type, name in CLASSES.items():
        assert plugins.load("servd.worker.models", model_type, name).__name__ == name
    assert set(SAME.values()) <= CLASSES.keys()


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama", "mistral"])
def test_what_files_leave_out_is_what_transformers_adds(model_type: str):
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    assert {key: getattr(config, key) for key in DEFAULTS[model_type]} == DEFAULTS[model_type]
