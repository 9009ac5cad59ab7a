"""Classes that servd has no file for, through transformers: its logits and greedy tokens."""

import builtins
import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from servd.base.errors import ConfigError, UnsupportedModel
from servd.checkpoint import model_spec
from servd.launch import find_and_resolve
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import attention_layers
from servd.worker.loading.model_loader import build_model
from servd.worker.models._transformers_types import LLAMA_LIKE
from servd.worker.ops import native
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from servd.worker.runner.dry_run import plan
from tests.parity.causal_classes import make
from tests.parity.families import greedy, logits_of
from tests.worker.driver import Driver, config_for

# Soft caps and windows by layer, sinks, experts, partial rotation, learned positions, compressed
# keys, norms of queries, parallel residuals, factors on logits, tables that count tokens, attention
# twice in a layer, classes that know flash attention only, heads and keys shared that differ by
# layer, a router whose weight is more than a product's; llama has a file.
CLASSES = {
    "bart": "BartForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "diffllama": "DiffLlamaForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "stablelm": "StableLmForCausalLM",
}
NUM_OUTPUTS = 6
TOLERANCE = 1e-4  # between logits, beside the largest


def check(folder: Path, **options: object) -> None:
    """Chunks, mixed batches, a prefix that is cached, and a request that starts over."""
    draw = random.Random(1)
    long, short, tail = ([draw.randrange(190) for _ in range(n)] for n in (37, 11, 3))
    driver = Driver(config_for(folder, model_impl="transformers", **options))
    first = driver.add(long)
    driver.step({first: 13})
    second = driver.add(short)
    driver.step({first: 5, second: 3})
    driver.generate([second, first], 3, chunk=7)
    shared = driver.first_blocks(first, 24)
    third = driver.add(long[:24] + tail, cached_blocks=shared)
    back = driver.add(driver.free(second), num_prompt_tokens=len(short))
    driver.generate([third, back, first], NUM_OUTPUTS, chunk=9)
    for slot, prompt in ((first, long), (back, short), (third, long[:24] + tail)):
        tokens = driver.tokens[slot]
        assert tokens == greedy(folder, prompt, len(tokens) - len(prompt))
        expected = logits_of(folder, tokens)[len(prompt) - 1 : -1]
        got = torch.stack(driver.logits[slot])
        tolerance = TOLERANCE * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(got, expected[-len(got) :], atol=tolerance, rtol=0)


@pytest.mark.parametrize("model_type", CLASSES)
def test_tokens_and_logits_equal_transformers(tmp_path: Path, model_type: str):
    check(make(tmp_path, model_type, CLASSES[model_type]))


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("dory", "DoryForCausalLM"), ("sarvam_moe", "Glm4MoeForCausalLM")],
)
def test_layers_that_run_twice_and_parts_that_a_checkpoint_has_fused(
    tmp_path, model_type, architecture
):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    check(make(tmp_path, model_type, architecture))


def test_a_cache_that_makes_tokens_depend_on_steps_is_refused(tmp_path: Path):
    folder = make(tmp_path, "olmo2", CLASSES["olmo2"])
    config = json.loads((folder / "config.json").read_text())
    config["recurrent_kv_cache_mode"] = "last_loop"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="recurrent_kv_cache_mode 'last_loop'"):
        Driver(config_for(folder, model_impl="transformers"))


def test_with_the_kernels_of_a_cpu_and_16_bits(tmp_path: Path):
    folder = make(tmp_path, "olmo2", "Olmo2ForCausalLM")
    check(folder, block_size=16)
    driver = Driver(config_for(folder, block_size=16, dtype="bfloat16", quantization="int8"))
    slot = driver.add([5, 6, 7, 8])
    driver.generate([slot], 1)
    exact = logits_of(folder, [5, 6, 7, 8])[-1].log_softmax(-1)
    got = driver.logits[slot][0].log_softmax(-1)
    assert 0 < torch.nn.functional.kl_div(got, exact, log_target=True, reduction="sum") < 1e-2


@pytest.mark.parametrize("model_type", sorted(LLAMA_LIKE))
def test_llama_like_classes_run_fused(tmp_path: Path, model_type: str):
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    folder = make(tmp_path, model_type, names)
    check(folder, block_size=16)
    driver = Driver(config_for(folder, block_size=16, model_impl="transformers"))
    driver.generate([driver.add([5, 6, 7, 8])], 3)
    runner = cast("CPUModelRunner", driver.worker.runner)
    kinds = {type(module).__name__ for module in runner.model.modules()}
    assert kinds >= {"FusedAttention", "FusedRotary", "RMSNorm"}
    if model_type in ("llama", "qwen3") and native.library() is not None:
        assert runner.graphs and runner.graphs.is_recordable and runner.graphs.graphs


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("bloom", "BloomForCausalLM"),
        ("doge", "DogeForCausalLM"),
        ("mpt", "MptForCausalLM"),
        ("qwen3_next", "Qwen3NextForCausalLM"),
        ("roberta", "RobertaForCausalLM"),
    ],
)
def test_a_class_that_was_not_tested_is_refused_by_name(tmp_path, model_type, architecture):
    folder = make(tmp_path, model_type, architecture)
    if model_type == "bloom":  # as its checkpoints have it
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"seq_length": 128}))
    reason = (
        f"{architecture} cannot run in servd: .*{model_type!r} is not among those .* add a file"
    )
    with pytest.raises(UnsupportedModel, match=reason):
        Driver(config_for(folder, model_impl="transformers"))


def test_alibi_in_a_class_that_runs_without_is_refused(tmp_path: Path):
    folder = make(tmp_path, "falcon", CLASSES["falcon"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"alibi": True}))
    with pytest.raises(
        UnsupportedModel, match="FalconForCausalLM cannot run in servd: it has ALiBi"
    ):
        Driver(config_for(folder))


def rotary_of(folder: Path, kind: str) -> Path:
    """The checkpoint with these rotary positions, of 64 tokens at first."""
    config = json.loads((folder / "config.json").read_text())
    first = {"original_max_position_embeddings": 64}  # Phi-3 has it outside too
    factors = {"factor": 4.0, "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
    config["rope_parameters"] |= first | factors | {"rope_type": kind}
    config |= first
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("model_type", "kind"), [("olmo2", "dynamic"), ("phi3", "longrope")])
def test_positions_that_follow_the_longest_request_are_refused(tmp_path, model_type, kind):
    folder = rotary_of(make(tmp_path, model_type, CLASSES[model_type]), kind)
    hint = "up to --max-model-len 64" if kind == "longrope" else ""
    with pytest.raises(UnsupportedModel, match=f"follow the longest request.*{hint}"):
        Driver(config_for(folder, max_model_len=128, model_impl="transformers"))


def test_longrope_runs_up_to_the_first_context(tmp_path: Path):
    check(rotary_of(make(tmp_path, "phi3", CLASSES["phi3"]), "longrope"), max_model_len=64)


def test_memory_is_planned_for_a_model_of_transformers(tmp_path: Path):
    folder = make(tmp_path, "gemma4_text", CLASSES["gemma4_text"])
    sizes = plan(config_for(folder), model_spec.read_spec(folder)).sizes
    weights = sum(weight.nbytes for weight in build(folder).parameters())
    assert abs(sizes.weights - 2 * weights) < weights / 4  # float32, packed in whole panels


def test_a_config_that_transformers_refuses_is_a_refusal(tmp_path: Path):
    folder = make(tmp_path, "phi3", "Phi3ForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="transformers does not build it .*validate_rope"):
        Driver(config_for(folder, model_impl="transformers"))


def test_code_of_a_checkpoint_is_not_run_and_nobody_is_asked_whether_to(tmp_path, monkeypatch):
    config = {"auto_map": {"AutoConfig": "novel.NovelConfig"}, "max_position_embeddings": 32}
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"model_type": "novel"}))
    (tmp_path / "novel.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w')")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    with pytest.raises(UnsupportedModel, match="servd does not run code of a checkpoint"):
        build(tmp_path)
    assert not (tmp_path / "has_run").exists()


def test_a_checkpoint_that_asks_for_tuples_runs(tmp_path: Path):
    folder = make(tmp_path, "phi3", CLASSES["phi3"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"return_dict": False}))
    driver = Driver(config_for(folder, model_impl="transformers"))
    driver.generate([driver.add([5, 6, 7])], 2)


def test_what_servds_file_does_not_do_may_run_through_transformers(tmp_path: Path):
    folder = make(tmp_path, "qwen2", "Qwen2ForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 7}
    config["layer_types"][0] = "sliding_attention"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="layer_types.*--model-impl transformers"):
        find_and_resolve(config_for(folder, max_model_len=64))
    check(folder)


def test_layers_that_training_leaves_out_by_chance_are_all_there(tmp_path: Path):
    folder = make(tmp_path, "opt", "OPTForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layerdrop": 1.0}))
    assert len(attention_layers(build(folder))) == config["num_hidden_layers"]


def test_what_transformers_keeps_in_32_bits_stays_so(tmp_path: Path):
    folder = make(tmp_path, "deepseek_v3", "DeepseekV3ForCausalLM")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def precise(model: torch.nn.Module) -> set[str]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        names = [name for name, tensor in tensors if tensor.dtype == torch.float32]
        return {name.removeprefix("hf.") for name in names if "rotary_emb" not in name}

    expected = precise(theirs)
    assert any("e_score_correction_bias" in name for name in expected)
    assert precise(build(folder)) == expected


def build(folder: Path, num_ranks: int = 1) -> Any:
    ranks = Parallel(0, num_ranks)
    return build_model(
        model_spec.read_spec(folder), torch.bfloat16, torch.device("cpu"), ranks, "transformers"
    )


@pytest.mark.parametrize(("model_type", "num_heads"), [("gpt_neox", 2), ("olmo2", 4)])
def test_a_rank_has_its_share(tmp_path: Path, model_type: str, num_heads: int):
    """That ranks together are right: tests/worker/test_parallel.py. The plan of OLMo 2, which
    norms all heads at once, leaves attention whole."""
    folder = make(tmp_path, model_type, CLASSES[model_type])
    whole = build(folder)
    share = build(folder, 2)
    sizes = [
        sum(weight.numel() for name, weight in model.named_parameters() if "mlp" in name)
        for model in (whole, share)
    ]
    assert sizes[1] < 0.55 * sizes[0]
    assert {layer.query_shape[1] for layer in attention_layers(share)} == {num_heads}
    assert {layer.query_shape[1] for layer in attention_layers(whole)} == {4}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mixtral", r"mlp\.experts.*: --tensor-parallel-size splits no experts"),
        ("opt", "it has no tensor-parallel plan"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, model_type: str, reason: str):
    folder = make(tmp_path, model_type, CLASSES[model_type])
    with pytest.raises(UnsupportedModel, match=f"cannot run in servd: .*{reason}"):
        build(folder, 2)
