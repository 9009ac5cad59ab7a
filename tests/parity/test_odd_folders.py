"""Folders whose files say a thing twice, or in another place: as transformers reads them."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from servd.worker.device.parallel import Parallel
from servd.worker.loading.model_loader import build_model, load_weights, quant_method_maker
from tests.parity.families import CASES, LONG_ROPE
from tests.parity.oracle import PROMPT, answer_of_servd, answer_of_transformers, compare
from tests.worker.driver import Driver, config_for
from tests.worker.quantization import checkpoints

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FIRST = {"original_max_position_embeddings": 32}
# Keys of tests/parity/families.py that these models do not read.
UNREAD = {
    "qwen3_5_text": (
        "norm_topk_prob",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "shared_expert_intermediate_size",
    ),
    "qwen3_5_moe_text": ("norm_topk_prob",),
}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """(model_type, **keys) -> folder of a copy with these keys of config.json; None removes one."""

    def make(model_type: str, /, variant: str = "", **keys: Any) -> Path:
        folder = tmp_path / "model"
        source = request.getfixturevalue("checkpoints")(
            model_type, variant or next(iter(CASES[model_type]))
        )
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text()) | keys
        gone = [key for key, value in keys.items() if value is None]
        for key in (*gone, *UNREAD.get(model_type, ())):
            config.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def check_equal(folder: Path) -> None:
    assert compare(folder)[0] == "equal", compare(folder)


# ---- rotations ----

PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn beside the default": ("llama", {"rope_scaling": YARN | FIRST}),
    "linear beside another base": (
        "llama",
        THETA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "a base beside": ("qwen2", {"rope_scaling": YARN | FIRST, "rope_theta": 300.0}),
    "yarn, a length beside": (
        "qwen3",
        {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}} | FIRST,
    ),
    "llama3, a length beside": ("llama", {"rope_parameters": None, "rope_scaling": LLAMA3} | FIRST),
    "two lengths": (
        "mistral",
        {"rope_parameters": YARN | {"rope_theta": 100.0} | FIRST}
        | {"original_max_position_embeddings": 16},
    ),
    "a length that linear does not read": (
        "olmo2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}} | FIRST,
    ),
    "a length inside of dynamic": (
        "granite",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0} | FIRST},
    ),
    "mixtral": ("mixtral", {"rope_scaling": YARN} | FIRST),
    "moe": ("qwen3_moe", {"rope_scaling": LLAMA3} | FIRST),
    "smollm3": ("smollm3", {"rope_scaling": YARN} | FIRST),
    "gpt_oss": ("gpt_oss", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "gpt_oss, yarn": ("gpt_oss", {"rope_scaling": YARN | FIRST | {"truncate": False}}),
    "gemma2": ("gemma2", {"rope_scaling": YARN} | FIRST),
    "gemma3, both": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3, flat": ("gemma3_text", {"rope_parameters": YARN | {"rope_theta": 77.0} | FIRST}),
    "gemma3, older": (
        "gemma3_text",
        {"rope_parameters": None, "rope_theta": 99.0, "rope_local_base_freq": 55.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3, a length beside": ("gemma3_text", FIRST),
    "deepseek": ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.7}} | FIRST),
    "phi3": (
        "phi3",
        {"rope_scaling": LONG_ROPE | {"type": "longrope", "original_max_position_embeddings": 16}}
        | {"original_max_position_embeddings": 128, "max_position_embeddings": 512},
    ),
    "qwen3_next": ("qwen3_next", {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}} | FIRST),
    "qwen3_next, a small base": (
        "qwen3_next",
        {"rope_parameters": YARN | FIRST | {"partial_rotary_factor": 0.5, "rope_theta": 1.5}},
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_rotation_in_either_place(copy, case: str):
    model_type, keys = PLACES[case]
    check_equal(copy(model_type, **keys))


def test_the_length_follows_the_rotation_that_is_read(copy):
    folder = copy("llama", rope_scaling=YARN | {"original_max_position_embeddings": 128})
    assert read_spec(folder).max_position_embeddings == 512
    config = json.loads((folder / "config.json").read_text()) | FIRST
    (folder / "config.json").write_text(json.dumps(config))
    assert read_spec(folder).max_position_embeddings == 128
    assert read_spec(folder, {"rope_scaling": {"factor": 8.0}}).max_position_embeddings == 256
    longer = {"original_max_position_embeddings": 64}
    assert read_spec(folder, longer).max_position_embeddings == 256
    assert read_spec(folder, {"rope_scaling": longer}).max_position_embeddings == 256


@pytest.mark.parametrize("value", [None, "0", True, -1.0, float("nan"), 0, [1e4], {"a": 1}])
@pytest.mark.parametrize("place", ["rope_theta", "factor", "original_max_position_embeddings"])
def test_a_number_of_a_rotation_that_is_none(copy, place: str, value: Any):
    rope = YARN | FIRST | {"rope_theta": 1e4, place: value}
    if place == "factor" and value is None:  # transformers computes it
        check_equal(copy("llama", rope_parameters=rope))
        return
    with pytest.raises(ConfigError, match=place if value is not None else "rope_|config"):
        answer_of_servd(copy("llama", rope_parameters=rope))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_head_of_deepseek_that_is_not_what_is_rotated(copy, model_type: str):
    with pytest.raises(ConfigError, match="head_dim 2 is not"):
        answer_of_servd(copy(model_type, head_dim=2))


# ---- layers and classes ----


@pytest.mark.parametrize(
    "types", [["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 3]
)
def test_windows_in_some_layers_of_mistral(copy, types: list[str]):
    check_equal(copy("mistral", layer_types=types))


@pytest.mark.parametrize("is_used", [None, True, False])
def test_windows_of_smollm3_are_those_of_its_layer_types(copy, is_used: bool | None):
    check_equal(copy("smollm3", use_sliding_window=is_used))


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "smollm3"])
@pytest.mark.parametrize("types", [["full_attention"], ["full_attention"] * 2 + ["wide"], "full"])
def test_layer_types_that_are_none(copy, model_type: str, types: Any):
    with pytest.raises(ConfigError, match="layer_types"):
        answer_of_servd(copy(model_type, layer_types=types))


@pytest.mark.parametrize(
    ("model_type", "variant"), [("deepseek_v2", "groups, short queries"), ("deepseek_v3", "")]
)
def test_more_experts_of_a_token_than_its_groups_have(copy, model_type: str, variant: str):
    with pytest.raises(ConfigError, match="3 experts of a token, and 2 in its groups"):
        answer_of_servd(copy(model_type, variant, num_experts_per_tok=3, topk_group=1))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "llama", "phi3"])
def test_layer_types_that_are_not_read_are_refused(copy, model_type: str):
    types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ConfigError, match="layer_types"):
        answer_of_servd(copy(model_type, layer_types=types, sliding_window=8))


def test_a_window_of_qwen_with_experts_is_in_all_layers(copy):
    keys = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    with pytest.raises(ConfigError, match="sliding"):
        answer_of_servd(copy("qwen3_moe", layer_types=None, **keys))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "mixtral", "granite", "phi3"])
def test_attention_both_ways_is_refused(copy, model_type: str):
    with pytest.raises(ConfigError, match="is_causal"):
        answer_of_servd(copy(model_type, is_causal=False))


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mixtral", "deepseek_v3", "qwen3_next"])
def test_architectures_that_name_the_bare_model(copy, model_type: str):
    import transformers

    name = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES[model_type]
    folder = copy(model_type, architectures=[name])
    expected = answer_of_servd(folder)
    for architectures in (None, [], [""]):
        config = json.loads((folder / "config.json").read_text()) | {"architectures": architectures}
        (folder / "config.json").write_text(json.dumps(config))
        assert torch.equal(answer_of_servd(folder), expected)


@pytest.mark.parametrize(
    "name",
    ["LlamaAttention", "LlamaForSequenceClassification", "Rotary", "MistralForCausalLM", "x"],
)
def test_architectures_that_name_another_class(copy, name: str):
    with pytest.raises(ConfigError, match=name):
        answer_of_servd(copy("llama", architectures=[name]))


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3", "model.norm.weight"), ("gpt2", "transformer.h.1.ln_1.bias")]
)
def test_a_vector_that_is_not_finite_is_refused(copy, model_type: str, name: str, number: float):
    folder = copy(model_type)
    tensors = load_file(folder / WHOLE)
    tensors[name][3] = number
    save_file(tensors, folder / WHOLE)
    with pytest.raises(ConfigError, match=name.rpartition(".1.")[2]):
        answer_of_servd(folder)


def test_a_class_of_another_family_is_refused(copy):
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        answer_of_servd(copy("mistral", architectures=["LlamaForCausalLM"]))


def test_a_bare_model_without_a_head_makes_vectors(copy, tmp_path: Path):
    folder = copy("llama", architectures=["LlamaModel"])
    tensors = load_file(folder / WHOLE)
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, folder / WHOLE)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        answer_of_servd(folder)
    (folder / "pooling").mkdir()
    (folder / "pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    places = {"Transformer": "", "Pooling": "pooling"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for kind, path in places.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    driver = Driver(config_for(folder))
    weights = {name for name, _ in driver.worker.runner.model.named_parameters()}
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize(
    "model_type", ["mpnet", "distilbert", "electra", "albert", "deberta-v2", "camembert"]
)
def test_an_encoder_without_a_file_is_called_one(tmp_path: Path, model_type: str):
    import transformers

    options = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "embedding_size": 16}
    options |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(model_type, **options)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="encoder"):
        answer_of_servd(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors"])
def test_quantization_that_is_stated_of_plain_weights(copy, caplog, method: str):
    folder = copy("llama")
    expected = answer_of_servd(folder)
    config = json.loads((folder / "config.json").read_text())
    stated = {"quant_method": method, "bits": 4, "group_size": 32}
    stated = stated if method in ("gptq", "awq") else {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with caplog.at_level(logging.WARNING, logger="servd.worker"):
        assert torch.equal(answer_of_servd(folder), expected)
    assert any("no layer is quantized" in record.getMessage() for record in caplog.records)


# ---- output heads ----

TIED = {"tie_word_embeddings": True}


def add_head(folder: Path, name: str, **changes: Any) -> None:
    """Store a head that differs from the embedding, which has this name."""
    tensors = load_file(folder / WHOLE)
    head = tensors[name] + 0.1 * torch.randn_like(tensors[name])
    save_file(tensors | {"lm_head.weight": head}, folder / WHOLE, {"format": "pt"})


@pytest.mark.parametrize("model_type", [name for name in CASES if name != "gpt2"])
def test_a_head_that_differs_from_a_tied_embedding(copy, caplog, model_type: str):
    folder = copy(model_type, **TIED)
    is_mamba = model_type == "mamba2"
    add_head(folder, "backbone.embeddings.weight" if is_mamba else "model.embed_tokens.weight")
    with caplog.at_level(logging.WARNING, logger="servd.worker"):
        check_equal(folder)
    assert any("lm_head.weight" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"model_impl": "transformers"}])
def test_a_head_of_gpt2_that_differs(copy, options: dict[str, str]):
    folder = copy("gpt2")
    add_head(folder, "transformer.wte.weight")
    driver = Driver(config_for(folder, **options))
    slot = driver.add(PROMPT)
    driver.generate([slot], 1)
    expected = answer_of_transformers(folder)
    assert expected is not None
    limit = 0.3 if "quantization" in options else 1e-3  # a tied head is 3 away
    assert (driver.logits[slot][0] - expected).abs().max() < limit


def test_an_equal_head_stays_tied(copy, caplog):
    folder = copy("llama", "tied, biases")
    tensors = load_file(folder / WHOLE)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, folder / WHOLE, {"format": "pt"})
    runner = Driver(config_for(folder)).worker.runner
    assert runner.model.lm_head is runner.model.model.embed_tokens
    check_equal(folder)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "smollm3", "gpt2", "qwen3"])
def test_a_tied_model_that_stores_its_head_only(copy, model_type: str):
    folder = copy(model_type, **TIED)
    tensors = load_file(folder / WHOLE)
    tensors.pop("lm_head.weight", None)
    name = "transformer.wte.weight" if model_type == "gpt2" else "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors.pop(name)
    save_file(tensors, folder / WHOLE, {"format": "pt"})
    check_equal(folder)


def test_an_adapter_beside_the_weights_is_refused(copy):
    """transformers applies it, where PEFT is installed."""
    folder = copy("llama")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ConfigError, match=r"adapter_config\.json .*--lora-modules"):
        answer_of_servd(folder)


@pytest.mark.parametrize("is_only", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_heads_in_stages(copy, model_type: str, is_only: bool):
    """The last stage has the head, and the first one the embedding."""
    folder = copy(model_type, **TIED)
    name = "transformer.wte.weight" if model_type == "gpt2" else "model.embed_tokens.weight"
    add_head(folder, name)
    if is_only:
        tensors = load_file(folder / WHOLE)
        del tensors[name]
        save_file(tensors, folder / WHOLE, {"format": "pt"})
    make = quant_method_maker(torch.float32, None, str(folder))
    models: list[Any] = []
    for stage in range(2):
        cpu = torch.device("cpu")
        model = build_model(
            read_spec(folder), torch.float32, cpu, Parallel(stage=stage, num_stages=2)
        )
        load_weights(model, str(folder), lambda _: None, make)
        models.append(model)
    first, last = models
    stored = load_file(folder / WHOLE)
    rows = torch.arange(199)
    assert torch.equal(
        table_of(first, model_type)(rows), stored.get(name, stored["lm_head.weight"])
    )
    head = last.compute_logits(torch.eye(stored["lm_head.weight"].shape[1])).T
    torch.testing.assert_close(head, stored["lm_head.weight"])


def table_of(model: Any, model_type: str) -> Any:
    return model.transformer.wte if model_type == "gpt2" else model.model.embed_tokens


# ---- weight files ----


def save(folder: Path, name: str, shift: float = 0.0, keep: str = "") -> dict[str, torch.Tensor]:
    tensors = load_file(folder / WHOLE)
    kept = {key: x for key, x in tensors.items() if keep in key}
    if shift:
        kept = {key: x + shift * torch.randn_like(x) for key, x in kept.items()}
    save_file(kept, folder / name, {"format": "pt"})
    return kept


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


OTHERS = [
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "model.fp16.safetensors",
    "model-00001-of-00001.safetensors",
    "a.safetensors",
]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("has_index", [False, True])
def test_the_whole_file_comes_first(copy, caplog, other: str, has_index: bool):
    folder = copy("llama")
    tensors = save(folder, other, shift=0.3)
    if has_index:
        write_index(folder, dict.fromkeys(tensors, other))
    with caplog.at_level(logging.INFO, logger="servd.worker"):
        check_equal(folder)
    assert any(other in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("other", OTHERS[:3])
def test_files_beside_shards(copy, other: str):
    folder = copy("llama")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    tensors = load_file(folder / WHOLE)
    places = {name: names["layers.1" in name] for name in tensors}
    for file in names:
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    save(folder, other, shift=0.3)
    write_index(folder, places)
    (folder / WHOLE).unlink()
    check_equal(folder)
    expected = answer_of_servd(folder)
    (folder / INDEX).unlink()  # which transformers needs
    assert torch.equal(answer_of_servd(folder), expected)


def test_a_shard_has_a_tensor_that_the_index_gives_to_another(copy):
    folder = copy("llama")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    expected = answer_of_servd(folder)
    tensors = save(folder, names[1])
    save(folder, names[0], shift=0.3, keep="layers.1")
    write_index(folder, dict.fromkeys(tensors, names[1]) | {"lm_head.weight": names[1]})
    (folder / WHOLE).unlink()
    with pytest.raises(ConfigError, match="lacks|weights"):
        write_index(folder, dict.fromkeys(tensors, "gone.safetensors"))
        answer_of_servd(folder)
    write_index(folder, dict.fromkeys(tensors, names[1]) | {"unused": names[0]})
    assert torch.equal(answer_of_servd(folder), expected)


@pytest.mark.parametrize("weight_map", [[], "a", {"a": 1}, {"a": None}])
def test_an_index_that_is_none(copy, weight_map: Any):
    folder = copy("llama")
    (folder / WHOLE).rename(folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="weight_map"):
        answer_of_servd(folder)


def test_a_head_and_shards_of_a_quantized_checkpoint(copy, tmp_path: Path):
    """FP8 beside the same numbers in float32: a head of its own, and a tensor in both shards."""
    folder = copy("llama", **TIED)
    add_head(folder, "model.embed_tokens.weight")

    def quantize(name: str, weight: torch.Tensor) -> checkpoints.Made:
        codes = weight.to(torch.float8_e4m3fn)
        scale = torch.tensor([0.5])
        return {".weight": codes, ".weight_scale": scale}, codes.float() * scale

    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    quantized = tmp_path / "fp8"
    meant = checkpoints.write(folder, quantized, config, quantize)
    save_file(meant, folder / WHOLE, {"format": "pt"})
    expected = answer_of_servd(folder)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    places = dict.fromkeys(load_file(quantized / WHOLE), names[1])
    places |= {name: names[0] for name in places if "layers.0" in name}
    save(quantized, names[0], keep="layers.")  # with layers that the index gives to the other
    save(quantized, names[1])
    (quantized / WHOLE).unlink()
    write_index(quantized, places)
    torch.testing.assert_close(answer_of_servd(quantized), expected, atol=1e-3, rtol=0)
