"""GGUF files give transformers' logits and tokens of the original checkpoint."""

import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from servd.base.errors import ModelNotFound, UnsupportedModel
from servd.checkpoint import config_json, generation_config, hub, model_spec, weight_files
from servd.checkpoint import gguf as servd_gguf
from servd.checkpoint.gguf import ARCHITECTURES, gguf_accounts
from servd.worker.quantization import gguf as worker_gguf
from servd.worker.runner import dry_run
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from tests import gguf_files
from tests.gguf_files import Quant, write_model
from tests.parity import families
from tests.parity.families import make_checkpoint, reference
from tests.parity.test_models import NUM_OUTPUTS, check, prompts
from tests.worker.driver import Driver, config_for

ORIGINAL_OPEN = servd_gguf.open_file
LLAMA = families.LLAMA | {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
LONG_ROPE = families.LONG_ROPE
# The converter writes no scale of queries. The factor of embeddings is rounded to bfloat16: 8 is 8.
GEMMA = {"query_pre_attn_scalar": 16, "hidden_size": 64, "num_attention_heads": 4}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
GRANITE = families.GRANITE_HYBRID | {"shared_intermediate_size": 96, "intermediate_size": 96}
QWEN3_NEXT = families.QWEN3_NEXT | {
    "layer_types": None,
    "full_attention_interval": 2,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, tied, biases": ("llama", LLAMA | {"tie_word_embeddings": True, "attention_bias": True}),
    "llama 3.1": ("llama", LLAMA | {"rope_parameters": families.LLAMA3_ROPE}),
    "llama, linear": (
        "llama",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama, yarn": ("llama", LLAMA | {"rope_parameters": families.YARN_ROPE}),
    "qwen3, yarn of its own factor": (
        "qwen3",
        LLAMA | {"rope_parameters": families.YARN_ROPE | {"attention_factor": 1.3}},
    ),
    "mistral": ("mistral", LLAMA | {"sliding_window": None}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", LLAMA),
    "qwen3moe": (
        "qwen3_moe",
        families.QWEN3_MOE | LLAMA | {"norm_topk_prob": True, "moe_intermediate_size": 32},
    ),
    "llama, experts": ("mixtral", LLAMA | MIXTRAL),
    "gemma2": ("gemma2", families.GEMMA2 | GEMMA),
    "gemma3": (
        "gemma3_text",
        families.GEMMA3
        | GEMMA
        | {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", families.PHI3 | {"sliding_window": 7}),
    "phi3, long contexts": ("phi3", families.CASES["phi3"]["long contexts"]),
    "phi3, part of heads": ("phi3", families.CASES["phi3"]["part of heads"]),
    "gpt2": ("gpt2", families.GPT2 | {"n_embd": 64}),
    "gpt2, untied, n_inner": (
        "gpt2",
        families.GPT2 | {"tie_word_embeddings": False, "n_inner": 70},
    ),
    "gpt-oss": ("gpt_oss", families.GPT_OSS),
    "granitehybrid": ("granitemoehybrid", GRANITE),
    "granitehybrid, dense": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "lfm2": ("lfm2", families.LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", families.LFM2_MOE),
    "mamba2": ("mamba2", families.MAMBA2),
    "mamba2, biases, tied": ("mamba2", families.CASES["mamba2"]["one group, biases, tied"]),
    "qwen3next": ("qwen3_next", QWEN3_NEXT | {"norm_topk_prob": True}),
    "qwen35": ("qwen3_5_text", QWEN3_NEXT | {"moe_intermediate_size": None}),
    "qwen35moe": ("qwen3_5_moe_text", QWEN3_NEXT),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def written(tmp_path: Path):
    """Make a checkpoint of a case and its GGUF file; return both."""

    def write(case: str, **options: Any) -> tuple[Path, Path]:
        model_type, config = CASES[case]
        folder = make_checkpoint(tmp_path / "hf", model_type, config)
        return folder, write_model(tmp_path / "a.gguf", reference(folder), **options)

    return write


def compare(file: Path, folder: Path, lengths: tuple[int, ...] = (37, 1), **options: Any) -> None:
    driver = Driver(config_for(hub.find_model(str(file)), **options))
    for prompt in prompts(*lengths):
        slot = driver.add(prompt)
        driver.generate([slot], NUM_OUTPUTS, chunk=50)
        check(driver, folder, slot, prompt)
        driver.free(slot)


def test_every_architecture_has_a_case():
    cases = {name.partition(",")[0] for name in CASES}
    assert cases >= {*ARCHITECTURES}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_are_those_of_the_original(written, case: str):
    folder, file = written(case)
    compare(file, folder)
    assert not unknown_keys(file)


def unknown_keys(file: Path) -> list[str]:
    return [key for account in gguf_accounts(hub.find_model(str(file))) for key in account.unknown]


LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
UNSCALED = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"factor": 3.0}, LINEAR),
        ({"type": "linear", "factor": 3.0}, LINEAR),
        ({"type": "linear"}, UNSCALED),
        ({"type": "none", "factor": 3.0}, UNSCALED),
        ({"factor": 0.0}, UNSCALED),
        ({"../scale_linear": 3.0}, LINEAR),
        ({"../scale_linear": 3.0, "type": "linear"}, LINEAR),
        ({"../scale_linear": 5.0, "factor": 3.0}, LINEAR),
        ({"yarn_ext_factor": -1.0, "attn_factor": 1.0}, UNSCALED),
    ],
    ids=str,
)
def test_positions_are_scaled_as_in_llama_cpp(written, monkeypatch, changed, expected):
    _, file = written("llama")
    names = {f"llama.rope.scaling.{key}".replace("scaling.../", ""): key for key in changed}
    change_all(monkeypatch, {name: changed[key] for name, key in names.items()})
    assert config_json.read_config(hub.find_model(str(file)))["rope_parameters"] == expected


def test_a_scale_without_a_type_is_linear(written, monkeypatch):
    folder, file = written("llama, linear")
    change(monkeypatch, "llama.rope.scaling.type", None)
    compare(file, folder)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "llama.rope.scaling.attn_factor", 1.2),
        ("llama", "llama.rope.scaling.yarn_attn_factor", 1.2),
        ("llama", "llama.rope.scaling.yarn_ext_factor", 1.0),
        ("llama, linear", "llama.rope.scaling.attn_factor", 0.0),
        ("llama, yarn", "llama.rope.scaling.yarn_ext_factor", 0.0),
        ("llama, yarn", "llama.rope.scaling.attn_factor", 1.2),
        ("phi3, long contexts", "phi3.rope.scaling.factor", 2.0),
        ("phi3, long contexts", "phi3.rope.scale_linear", 2.0),
    ],
)
def test_scales_that_servd_does_not_compute_are_refused(written, monkeypatch, case, key, value):
    _, file = written(case)
    change(monkeypatch, key, value)
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\."):
        hub.find_model(str(file))


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "llama.attention.causal", False),
        ("llama", "llama.pooling_type", 1),
        ("llama", "llama.attention.scale", 0.5),
        ("llama", "llama.rope.dimension_sections", [4, 2, 2]),
        ("llama", "llama.logit_scale", 0.5),
        ("llama", "llama.rope.freq_base_swa", 1e4),
        ("llama", "llama.nextn_predict_layers", 1),
        ("llama", "llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("llama", "llama.final_logit_softcapping", 30.0),
        ("llama", "general.sampling.mirostat", 2),
        ("llama, experts", "llama.expert_weights_scale", 2.5),
        ("qwen3moe", "qwen3moe.expert_gating_func", 2),
        ("gemma2", "gemma2.attention.sliding_window_pattern", 3),
        ("gpt-oss", "gpt-oss.rope.freq_base_swa", 1e5),
    ],
)
def test_metadata_that_could_change_answers_is_unknown(written, monkeypatch, case, key, value):
    _, file = written(case)
    change(monkeypatch, key, value)
    assert unknown_keys(file) == [key.removeprefix(f"{case.partition(',')[0]}.")]


def test_metadata_without_effect_is_known(written, monkeypatch):
    _, file = written("llama")
    values = {
        "llama.attention.causal": True,
        "llama.pooling_type": 3,
        "general.quantized_by": "somebody",
        "general.base_model.0.name": "x",
        "tokenizer.ggml.fim_pre_token_id": 3,
        "quantize.imatrix.file": "x",
        "tokenizer.chat_template.tool_use": "x" * 1000,
    }
    change_all(monkeypatch, values)
    assert not unknown_keys(file)
    assert (hub.find_model(str(file)) / "metadata.json").stat().st_size < 4000


def test_sampling_parameters_are_the_files(written, monkeypatch):
    """Those that the file has not are llama.cpp's: --temp, --top-k, --top-p, --min-p."""
    _, file = written("llama")
    spec = model_spec.read_spec(hub.find_model(str(file)))
    usual = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert generation_config.read_generation_defaults(spec, "auto") == usual
    assert generation_config.read_generation_defaults(spec, "vllm") == {}
    values = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.1}
    change_all(monkeypatch, {f"general.sampling.{key}": value for key, value in values.items()})
    spec = model_spec.read_spec(hub.find_model(str(file)))
    expected = usual | {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert generation_config.read_generation_defaults(spec, "auto") == expected


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt-oss"])
def test_answers_end_at_the_tokens_of_llama_cpp(written, monkeypatch, case: str):
    """The list is one for all architectures, but gpt-oss has <|end|> inside of answers."""
    _, file = written(case)
    texts = ["<|im_end|>", "<|endoftext|>", "</s>", "<|end|>", "<end_of_turn>", "<|file_sep|>"]
    change(monkeypatch, "tokenizer.ggml.tokens", ["a", *texts, "<|im_start|>"])
    ends = model_spec.read_spec(hub.find_model(str(file))).eos_token_ids
    assert sorted(ends) == ([2] if case == "gpt-oss" else [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("name", ["eos", "eot", "eom", "bos", "unknown"])
def test_ids_beyond_the_tokens_are_refused_by_name(written, monkeypatch, name: str):
    _, file = written("llama")
    change(monkeypatch, f"tokenizer.ggml.{name}_token_id", 1 << 20)
    with pytest.raises(ModelNotFound, match=f"{name}_token_id is {1 << 20}, of"):
        hub.find_model(str(file))


def test_a_padding_beyond_the_tokens_is_dropped(written, monkeypatch):
    _, file = written("llama")
    change(monkeypatch, "tokenizer.ggml.padding_token_id", (1 << 32) - 1)
    assert "pad_token" not in config_json.read_json(
        hub.find_model(str(file)) / "tokenizer_config.json"
    )


def test_experts_may_be_tensors_of_their_own(written):
    folder, file = written("llama, experts", has_split_experts=True)
    compare(file, folder)


def test_a_long_context_of_phi3_has_its_own_factors(written):
    folder, file = written("phi3, long contexts")
    compare(file, folder, (140,), max_model_len=256)


@pytest.mark.parametrize(
    ("case", "quant"),
    [
        ("llama 3.1", Quant.BF16),
        ("llama, experts", Quant.Q8_0),
        ("llama, experts", Quant.MXFP4),
        ("qwen3moe", Quant.BF16),
        ("gemma2", Quant.Q8_0),
        ("phi3", Quant.MXFP4),
        ("gpt2", Quant.Q8_0),
        ("gpt-oss", Quant.MXFP4),
        ("granitehybrid, dense", Quant.Q8_0),
        ("lfm2", Quant.Q4_0),
        ("qwen35", Quant.Q8_0),
        ("qwen3next", Quant.Q5_1),
    ],
)
def test_blocks_are_the_numbers_that_gguf_dequantizes(written, tmp_path, case, quant):
    """The reference has the numbers of the blocks as its weights."""
    model_type, config = CASES[case]
    sizes = {"intermediate_size": 96} if model_type != "gpt2" else {}
    if "hidden_size" in config:
        sizes["hidden_size"] = 64
    folder = make_checkpoint(tmp_path / "hf", model_type, config | sizes)
    model = reference(folder)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        data = gguf.quants.quantize(tensor.contiguous().numpy(), quant)
        return torch.from_numpy(gguf.quants.dequantize(data, quant).copy())

    with torch.no_grad():
        for tensor in gguf_files.matrices_of(model):
            tensor.copy_(rounded(tensor))
    file = write_model(tmp_path / "a.gguf", model, quant)
    compare(file, folder, cpu_activation_dtype="float32")


@pytest.mark.parametrize("case", ["mamba2", "qwen35"])
def test_a_plan_of_states_reads_no_numbers(written, case):
    folder = hub.find_model(str(written(case)[1]))
    spec = model_spec.read_spec(folder)
    runner = dry_run.load(CPUModelRunner, config_for(folder), spec, torch.device("cpu"))
    assert runner.weights_bytes == Driver(config_for(folder)).worker.runner.weights_bytes


def test_what_would_be_computed_wrongly_is_refused(written, monkeypatch):
    _, file = written("llama 3.1")
    for key, value, message in (
        ("llama.rope.scaling.factor", 2.0, "rope_freqs.weight beside rope scaling 'linear'"),
        ("llama.rope.scaling.type", "su", "rope scaling 'su'"),
        ("llama.rope.dimension_count", 8, "partial_rotary_factor 0.5 is not supported"),
    ):
        change(monkeypatch, key, value)
        with pytest.raises(UnsupportedModel, match=message):
            Driver(config_for(hub.find_model(str(file))))


def test_a_scale_of_yarn_that_servd_does_not_know_is_refused(written, monkeypatch):
    _, file = written("llama, yarn")
    change(monkeypatch, "llama.rope.scaling.yarn_ext_factor", 0.5)
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.yarn_ext_factor"):
        hub.find_model(str(file))


@pytest.mark.parametrize(("layers", "scalar"), [(3, 16), (46, 128 // 4)])
def test_the_largest_gemma_scales_queries_by_its_width(written, layers: int, scalar: int):
    _, file = written("gemma2")
    reader, values = servd_gguf.open_file(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    values |= {"gemma2.block_count": layers, "gemma2.embedding_length": 128}
    config = servd_gguf.make_config(file, values, tensors)
    assert config["query_pre_attn_scalar"] == scalar


def test_experts_that_are_missing_or_of_another_shape_are_refused(written, monkeypatch):
    _, file = written("qwen3moe")
    change(monkeypatch, "qwen3moe.expert_count", None)
    with pytest.raises(ModelNotFound, match="expert_count"):
        hub.find_model(str(file))
    for key, value in (("expert_count", 9), ("expert_used_count", 9), ("expert_used_count", "x")):
        change(monkeypatch, f"qwen3moe.{key}", value)
        with pytest.raises(ModelNotFound, match="metadata is incomplete or wrong"):
            hub.find_model(str(file))


def test_heads_that_do_not_divide_the_rows_are_refused(written, monkeypatch):
    _, file = written("llama")
    change(monkeypatch, "llama.attention.head_count", 5)
    folder = hub.find_model(str(file))
    with pytest.raises(UnsupportedModel, match="64 rows of queries or keys for 5 heads"):
        list(worker_gguf.read(weight_files.find_weight_files(folder), {}, torch.device("cpu")))


def change(monkeypatch: pytest.MonkeyPatch, key: str, value: Any) -> None:
    change_all(monkeypatch, {key: value})


def change_all(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    """Change a file's metadata while it is read, and forget what was made of the file before."""
    open_file = ORIGINAL_OPEN

    def open_changed(path: Path, **options: Any) -> Any:
        reader, values = open_file(path, **options)
        values |= changed
        return reader, {name: value for name, value in values.items() if value is not None}

    monkeypatch.setattr(servd_gguf, "open_file", open_changed)
    monkeypatch.setattr(worker_gguf, "open_file", open_changed)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{os.environ['XDG_CACHE_HOME']}{abs(hash(str(changed)))}")
