"""GGUF files give transformers' logits and tokens of the original checkpoint."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf")

from servd.base.errors import ModelNotFound, UnsupportedModel  # noqa: E402
from servd.checkpoint import gguf as servd_gguf  # noqa: E402
from servd.checkpoint import hf  # noqa: E402
from servd.checkpoint.gguf import ARCHITECTURES  # noqa: E402
from servd.worker.quantization import gguf as worker_gguf  # noqa: E402
from tests import gguf_files  # noqa: E402
from tests.gguf_files import Quant, write_model  # noqa: E402
from tests.parity import families  # noqa: E402
from tests.parity.families import make_checkpoint, reference  # noqa: E402
from tests.parity.test_models import NUM_OUTPUTS, check, prompts  # noqa: E402
from tests.worker.driver import Driver, config_for  # noqa: E402

ORIGINAL_OPEN = servd_gguf.open_file
LLAMA = families.LLAMA | {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
LONG_ROPE = families.LONG_ROPE
# The converter writes no scale of queries. The factor of embeddings is rounded to bfloat16: 8 is 8.
GEMMA = {"query_pre_attn_scalar": 16, "hidden_size": 64, "num_attention_heads": 4}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
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
    driver = Driver(config_for(hf.find_model(str(file)), **options))
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


def test_experts_may_be_tensors_of_their_own(written):
    folder, file = written("llama, experts", has_split_experts=True)
    compare(file, folder)


def test_a_long_context_of_phi3_has_its_own_factors(written):
    folder, file = written("phi3, long contexts")
    compare(file, folder, (140,), max_model_len=256)


@pytest.mark.parametrize("quant", [Quant.BF16, Quant.Q8_0, Quant.MXFP4], ids=lambda q: q.name)
@pytest.mark.parametrize(
    "case", ["llama 3.1", "llama, experts", "qwen3moe", "gemma2", "phi3", "gpt2", "gpt-oss"]
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


def test_what_would_be_computed_wrongly_is_refused(written, monkeypatch):
    _, file = written("llama 3.1")
    for key, value, message in (
        ("llama.rope.scaling.type", "linear", "rope_freqs.weight beside rope scaling 'linear'"),
        ("llama.rope.scaling.type", "su", "rope scaling 'su'"),
        ("llama.rope.dimension_count", 8, "partial_rotary_factor 0.5 is not supported"),
    ):
        change(monkeypatch, key, value)
        with pytest.raises(UnsupportedModel, match=message):
            Driver(config_for(hf.find_model(str(file))))


def test_a_scale_of_yarn_that_servd_does_not_know_is_refused(written, monkeypatch):
    _, file = written("llama, yarn")
    change(monkeypatch, "llama.rope.scaling.yarn_ext_factor", 0.5)
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.yarn_ext_factor"):
        hf.find_model(str(file))


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
        hf.find_model(str(file))
    for key, value in (("expert_count", 9), ("expert_used_count", 9), ("expert_used_count", "x")):
        change(monkeypatch, f"qwen3moe.{key}", value)
        with pytest.raises(ModelNotFound, match="metadata is incomplete or wrong"):
            hf.find_model(str(file))


def test_heads_that_do_not_divide_the_rows_are_refused(written, monkeypatch):
    _, file = written("llama")
    change(monkeypatch, "llama.attention.head_count", 5)
    folder = hf.find_model(str(file))
    with pytest.raises(UnsupportedModel, match="64 rows of queries or keys for 5 heads"):
        list(worker_gguf.read(hf.weight_files(folder), {}, torch.device("cpu")))


def change(monkeypatch: pytest.MonkeyPatch, key: str, value: Any) -> None:
    """Change a file's metadata while it is read, and forget what was made of the file before."""
    open_file = ORIGINAL_OPEN

    def open_changed(path: Path, **options: Any) -> Any:
        reader, values = open_file(path, **options)
        values |= {key: value}
        return reader, {name: each for name, each in values.items() if each is not None}

    monkeypatch.setattr(servd_gguf, "open_file", open_changed)
    monkeypatch.setattr(worker_gguf, "open_file", open_changed)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{os.environ['XDG_CACHE_HOME']}{abs(hash(str(value)))}")
