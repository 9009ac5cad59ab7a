"""The account of a model's files: a key is used, without effect, or refused by name."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from servd.base.errors import UnsupportedModel
from servd.checkpoint.account import account_for
from servd.checkpoint.hub import DEMO_FOLDER
from servd.checkpoint.model_spec import read_spec
from servd.config import Config
from servd.launch import find_and_resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


def start(folder: Path, **options: Any) -> None:
    find_and_resolve(Config.load({"model": str(folder), "device": "cpu"} | options))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_scale", 0.5),
        ("is_causal", False),
        ("is_causal", None),  # which transformers takes for false
        ("logits_scaling", 2.0),
        ("mlp_bias", True),
        ("hidden_activation", "relu"),
        ("num_experts", 4),
        ("use_qk_norm", True),
    ],
)
def test_a_key_that_could_change_answers_is_refused_by_name(folder: Path, key: str, value: Any):
    change(folder, **{key: value})
    with pytest.raises(UnsupportedModel, match=rf"{key} \({value!r}\)"):
        start(folder)


def test_a_key_of_a_rotation_is_refused_by_name(folder: Path):
    change(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "ntk_alpha": 1000})
    with pytest.raises(UnsupportedModel, match=r"rope_parameters .*ntk_alpha \(1000\)"):
        start(folder)


@pytest.mark.parametrize(
    "keys",
    [
        {"attention_dropout": 0.1, "_anything": 1, "unsloth_fixed": True},
        {"is_causal": True, "mlp_bias": False, "add_cross_attention": False},
        {"sliding_window": None, "unheard_of": None},
    ],
)
def test_keys_without_effect_pass(folder: Path, keys: dict[str, Any]):
    change(folder, **keys)
    start(folder)


# Keys of published files that servd does not use: Codestral Mamba, DeepSeek-R1-0528-Qwen3-8B, Gemma
# 2, Granite 4 H, LFM2, Llama 2, Pixtral, Qwen2.5-7B-Instruct-1M, Qwen3-Coder, Qwen3.5, SmolLM3,
# SmolVLM, Snowflake Arctic, files of AutoRound and GPTQModel.
PUBLISHED: dict[str, dict[str, Any]] = {
    "config config.bert": {"eos_token_ids": 0, "is_decoder": False, "matryoshka_dimensions": [256]},
    "config config.gemma2": {"sliding_window_size": 4096},
    "config config.llama": {"do_sample": True, "is_decoder": True, "max_length": 4096}
    | {"neftune_noise_alpha": 0.0, "pixel_shuffle_factor": 4, "qk_layer_norms": False},
    "config config.granitemoehybrid": {"init_method": "mup", "normalization_function": "rmsnorm"}
    | {"layer_types": ["mamba", "attention"], "time_step_limit": [0.0, math.inf]},
    "config config.lfm2": {"block_dim": 2048, "block_use_xavier_init": True, "use_pos_enc": True}
    | {"block_use_swiglu": True, "conv_dim_out": 2048, "num_heads": 32, "tie_embedding": True},
    "config config.mamba2": {"norm_before_gate": True, "time_step_init_scheme": "random"}
    | {"rms_norm": True, "time_step_limit": [0.0, math.inf], "time_step_scale": 1.0},
    "config config.mistral": {"is_composition": True},
    "config config.qwen2": {"dual_chunk_attention_config": {"chunk_size": 262144}},
    "config config.qwen3_5_text": {"mlp_only_layers": [], "mtp_num_hidden_layers": 1},
    "config config.qwen3_moe": {
        "qkv_bias": False,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
    "rotation": {"attn_factor": 0.8782488562869419},
    "quantization quantization.awq": {"checkpoint_format": "gemm", "duo_scaling": False},
    "quantization quantization.gptq": {"act_bits": 16, "act_sym": True, "amp": True, "train_bs": 8},
    "adapter": {"lora_dtype": None, "lora_dropout": 0.1},
    "gguf": {"general.date": "2026", "general.dtype": "BF16", "general.filename": "a.gguf"},
    "tokenizer tokenizer.json": {
        "cache_dir": None,
        "device_map": "auto",
        "fast": False,
        "model_specific_special_tokens": {},
        "pad_token_id": 0,
        "pretokenize_regex": " ?",
    },
}


@pytest.mark.parametrize("tables", PUBLISHED)
def test_keys_of_published_files_pass(tables: str):
    assert not account_for("a file", PUBLISHED[tables], *tables.split()).unknown


@pytest.mark.parametrize(
    ("tables", "key", "value"),
    [
        ("config config.bert", "is_decoder", True),
        ("config config.llama", "qkv_bias", True),
        ("config config.llama", "use_qk_norm", True),
        ("config config.qwen3_moe", "shared_expert_intermediate_size", 64),
        ("quantization quantization.gptq", "act_bits", 8),
    ],
)
def test_other_values_of_such_keys_do_not_pass(tables: str, key: str, value: Any):
    assert account_for("a file", {key: value}, *tables.split()).unknown


def test_unknown_keys_are_allowed_on_demand_and_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    change(folder, attention_scale=0.5)
    with caplog.at_level(logging.WARNING, "servd"):
        start(folder, allow_unknown_keys=True)
    assert "attention_scale (0.5)" in caplog.text


def test_transformers_reads_its_config_json_itself(folder: Path):
    change(folder, attention_scale=0.5)
    start(folder, model_impl="transformers")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", None),
        ("rms_norm_eps", True),
        ("tie_word_embeddings", "false"),
        ("hidden_act", 3),
        ("rope_theta", None),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(folder: Path, key: str, value: Any):
    change(folder, **{key: value})
    with pytest.raises(UnsupportedModel, match=key):
        read_spec(folder)


def test_a_missing_key_has_the_default_of_its_model_type(folder: Path):
    for model_type, eps in (("olmo2", 1e-5), ("qwen3", 1e-6), ("phi3", 1e-5)):
        change(folder, model_type=model_type)
        config = json.loads((folder / "config.json").read_text())
        config.pop("rms_norm_eps", None)
        (folder / "config.json").write_text(json.dumps(config))
        assert read_spec(folder).config["rms_norm_eps"] == eps


REFUSED = {
    "bamba": "half of each head",
    "falcon_h1": "add up Mamba-2 and attention",
    "falcon_mamba": "Mamba-1",
    "jamba": "Mamba-1",
    "kimi_linear": "channel of its keys",
    "mamba": "Mamba-1",
    "minimax": "lightning attention",
    "nemotron_h": "a mixer or a feed-forward alone",
    "olmo_hybrid": "negative eigenvalues",
    "qwen4_exp": "hyper-connections",
    "rwkv": "time mixing",
    "zamba2": "share weights",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_whose_states_servd_does_not_compute_are_refused_by_name(
    folder: Path, model_type: str
):
    import transformers

    config = transformers.CONFIG_MAPPING[model_type]().to_dict()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(UnsupportedModel, match=f"model_type {model_type}.* {REFUSED[model_type]}"):
        read_spec(folder)
