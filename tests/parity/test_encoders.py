"""Encoders give transformers' hidden states and scores, however long the prompts of a step are."""

import json
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from servd import LLM
from servd.api.text.prompt import Pair, SharedText
from servd.base.errors import UnsupportedModel
from servd.checkpoint import pooling
from servd.checkpoint.config_json import read_json
from servd.checkpoint.model_spec import read_spec
from servd.messages.params import PoolingParams
from servd.worker.output_heads.pooler import PoolerDense
from servd.worker.runner import reference_check
from tests.parity.families import ENCODER, ENCODERS, make_checkpoint
from tests.worker.driver import Driver, config_for

ALL = [(model_type, variant) for model_type, variants in ENCODERS.items() for variant in variants]
TOLERANCE = 1e-5
LENGTHS = (50, 7, 1, 33, 100)
WORDS = "the cat sat on a mat while rain fell over green hills and nobody came".split()
TEXTS = ["the cat sat", "rain fell over green hills and nobody came", "a"]


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(4, 199) for _ in range(length)] for length in LENGTHS]


def run(folder: Path, params: PoolingParams, **options: Any) -> list[torch.Tensor]:
    """What one step makes of `prompts()`, flat."""
    driver = Driver(config_for(folder, block_size=16, enable_prefix_caching=False, **options))
    slots = [driver.add(prompt, params) for prompt in prompts()]
    output = driver.step({slot: driver.num_left(slot) for slot in slots})
    return [
        torch.frombuffer(bytearray(output.pooled[row]), dtype=torch.float32)
        for row in range(len(slots))
    ]


@pytest.mark.parametrize("backend", ["auto", "torch_sdpa"])
@pytest.mark.parametrize(("model_type", "variant"), ALL)
@torch.inference_mode()
def test_hidden_states(tmp_path: Path, model_type: str, variant: str, backend: str):
    from transformers import AutoModel

    folder = make_checkpoint(tmp_path, model_type, ENCODERS[model_type][variant], "AutoModel")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    params = PoolingParams(pooling="all", normalize=False)
    for prompt, got in zip(prompts(), run(folder, params, attention_backend=backend), strict=True):
        expected = model(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(got.view(expected.shape), expected, atol=TOLERANCE, rtol=0)


def test_norms_as_tensorflow_named_them(tmp_path: Path):
    folder = make_checkpoint(tmp_path, "bert", next(iter(ENCODERS["bert"].values())), "AutoModel")
    params = PoolingParams(pooling="all", normalize=False)
    expected = run(folder, params)
    tensors = load_file(folder / "model.safetensors")
    for old, new in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for got, meant in zip(run(folder, params), expected, strict=True):
        assert torch.equal(got, meant)


@pytest.mark.parametrize(("model_type", "variant"), ALL)
@torch.inference_mode()
def test_classification_heads(tmp_path: Path, model_type: str, variant: str):
    from transformers import AutoModelForSequenceClassification

    kind = "AutoModelForSequenceClassification"
    options = ENCODERS[model_type][variant]
    folder = make_checkpoint(tmp_path, model_type, options, kind)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    files = pooling.read(read_spec(folder))
    assert len(files.labels) == model.config.num_labels
    params = files.complete(PoolingParams(task="classify", normalize=False))
    for prompt, got in zip(prompts(), run(folder, params), strict=True):
        expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_packed", [True, False], ids=["Alibaba's names", "today's names"])
@torch.inference_mode()
def test_gte_as_it_was_published(tmp_path: Path, monkeypatch, caplog, is_packed: bool):
    """With code of its own, which transformers has by another name today."""
    from transformers import AutoModel

    folder = make_checkpoint(tmp_path / "model", "gte", ENCODERS["gte"]["one type"], "AutoModel")
    model = AutoModel.from_pretrained(folder).eval()
    config = read_json(folder / "config.json")
    config |= {"model_type": "new", "architectures": ["NewModel"], "rope_theta": 20000}
    config |= {"auto_map": {"AutoModel": "NewModel"}, "position_embedding_type": "rope"}
    config["rope_scaling"] = {"type": "ntk", "factor": 8.0}
    del config["rope_parameters"]
    write(folder / "config.json", config)
    tensors = load_file(folder / "model.safetensors") if is_packed else model.state_dict()
    assert any("qkv_proj" in name for name in tensors) == is_packed
    prefix = "new." if is_packed else ""
    save_file(
        {prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    pairs = torch.arange(8)  # https://kexue.fm/archives/9706, equation 6
    model.rotary_emb.inv_freq.copy_(1 / (8 * 20000) ** (pairs / 8) / 8 ** (2 / 16))
    params = PoolingParams(pooling="all", normalize=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", compute_here)
    caplog.set_level("INFO")
    for prompt, got in zip(prompts(), run(folder, params, check_vectors=True), strict=True):
        expected = model(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(got.view(expected.shape), expected, atol=TOLERANCE, rtol=0)
    assert "vectors equal the reference of transformers" in caplog.text


def make_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Words, with [CLS] and [SEP] around one text or two, as BERT has it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {token: i for i, token in enumerate([*special, *WORDS, "query", ":"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    return backend


def options_for(folder: Path) -> dict[str, Any]:
    """Those of an LLM."""
    small = {"kv_cache_memory": 1 << 22, "check_vectors": False}
    return {"model": str(folder), "device": "cpu", **small}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


@torch.inference_mode()
def test_embeddings_are_made_as_the_files_say(tmp_path: Path):
    from transformers import AutoModel

    folder = make_checkpoint(tmp_path, "bert", ENCODER, "AutoModel")
    tokenizer = make_tokenizer(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_N": "Normalize"}
    write(
        folder / "modules.json",
        [
            {"type": f"sentence_transformers.models.{kind}", "path": path}
            for path, kind in kinds.items()
        ],
    )
    write(folder / "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    activation = "torch.nn.modules.activation.Tanh"
    write(
        folder / "2_Dense/config.json",
        {"in_features": 48, "out_features": 20, "activation_function": activation},
    )
    texts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write(folder / "config_sentence_transformers.json", texts)
    weight = torch.randn(20, 48)
    bias = torch.randn(20)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense/model.safetensors")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def embedding(text: str, dimensions: int) -> torch.Tensor:
        ids = torch.tensor([tokenizer.encode(f"query: {text}").ids])
        vector = torch.tanh(weight @ model(ids).last_hidden_state[0].mean(0) + bias)
        return torch.nn.functional.normalize(vector[:dimensions], dim=0)

    with closing(LLM(**options_for(folder))) as llm:
        for size in (20, 8):
            outputs = llm.embed(TEXTS, PoolingParams(dimensions=size))
            got = torch.tensor([output.outputs.embedding for output in outputs])
            expected = torch.stack([embedding(text, size) for text in TEXTS])
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_pairs_are_scored_with_their_token_types(tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    kind = "AutoModelForSequenceClassification"
    folder = make_checkpoint(tmp_path, "bert", ENCODER | {"num_labels": 1}, kind)
    tokenizer = make_tokenizer(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    params = PoolingParams(task="classify", normalize=False)
    with closing(LLM(**options_for(folder))) as llm:
        got = llm.embed([Pair(SharedText(TEXTS[0]), text) for text in TEXTS], params)  # type: ignore[list-item]
    for text, output in zip(TEXTS, got, strict=True):
        (score,) = output.outputs.embedding
        encoding = tokenizer.encode(TEXTS[0], text)
        assert 1 in encoding.type_ids
        ids = torch.tensor([encoding.ids])
        types = torch.tensor([encoding.type_ids])
        expected = model(ids, token_type_ids=types).logits.item()
        assert score == pytest.approx(expected, abs=TOLERANCE)


def test_a_model_that_differs_from_its_files_is_not_served(tmp_path: Path, monkeypatch):
    folder = tmp_path / "model"
    make_checkpoint(
        folder, "bert", ENCODER | {"num_labels": 2}, "AutoModelForSequenceClassification"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", compute_here)
    config = config_for(folder, block_size=16, enable_prefix_caching=False, check_vectors=True)
    Driver(config)
    (kept,) = tmp_path.glob("servd/references/*.json")
    before = kept.stat().st_mtime_ns
    Driver(config)
    assert kept.stat().st_mtime_ns == before, "a second start computes nothing"
    numbers = json.loads(kept.read_text())
    numbers[1][0] += 0.01
    kept.write_text(json.dumps(numbers))
    with pytest.raises(UnsupportedModel, match="3 prompts differ .* is not served"):
        Driver(config)


class compute_here:
    """In place of the process that computes the reference."""

    returncode = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", command[2:])
            reference_check.main()

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        return b"", b""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_reference_is_in_float32_whatever_the_checkpoint_has(tmp_path: Path, dtype):
    from transformers import AutoModel

    folder = make_checkpoint(tmp_path, "bert", ENCODER, "AutoModel")
    model = AutoModel.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(folder)
    widened = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = reference_check.prompts(read_spec(folder), 120)
    with torch.inference_mode():
        expected = [
            widened(torch.tensor([token_ids])).last_hidden_state[0].mean(0) for token_ids in ids
        ]
    for got, vector in zip(reference_check.reference(str(folder), 120), expected, strict=True):
        torch.testing.assert_close(torch.tensor(got), vector, atol=TOLERANCE, rtol=0)


def test_the_reference_runs_modules_in_their_order(tmp_path: Path):
    """So that the check finds an order that servd has read wrongly."""
    kinds = {"": "Transformer", "1_P": "Pooling", "2_N": "Normalize", "3_D": "Dense"}
    entries = [{"type": f"sentence_transformers.{kinds[path]}", "path": path} for path in kinds]
    write(tmp_path / "modules.json", entries)
    write(tmp_path / "1_P/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": True})
    dense = {"in_features": 6, "out_features": 4}
    hidden = torch.randn(5, 6)
    weight = torch.randn(4, 6)
    bias = torch.randn(4)
    tensors = {"linear.weight": weight, "linear.bias": bias}
    mean = hidden.mean(0)
    vectors = {
        "sentence_embedding": torch.tanh(weight @ (mean / mean.norm()) + bias),
        "token_embeddings": mean / mean.norm(),
    }
    for name, vector in vectors.items():
        write(tmp_path / "3_D/config.json", dense | {"module_input_name": name})
        save_file(tensors, tmp_path / "3_D/model.safetensors")
        with torch.inference_mode():
            torch.testing.assert_close(reference_check._run_modules(tmp_path, hidden), vector)


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        ({}, ["linear.weight"]),
        ({"bias": False}, ["linear.weight", "linear.bias"]),
        ({}, ["linear.weight", "linear.bias", "residual.weight"]),
        ({"out_features": 5}, ["linear.weight", "linear.bias"]),
        (
            {"activation_function": "torch.nn.modules.linear.Linear"},
            ["linear.weight", "linear.bias"],
        ),
    ],
    ids=str,
)
def test_a_layer_whose_tensors_are_not_those_of_its_file_is_refused(tmp_path: Path, stated, names):
    shapes = {"linear.weight": (4, 6), "linear.bias": (4,), "residual.weight": (4, 6)}
    write(tmp_path / "d/config.json", {"in_features": 6, "out_features": 4} | stated)
    save_file({name: torch.zeros(shapes[name]) for name in names}, tmp_path / "d/model.safetensors")
    with pytest.raises(UnsupportedModel):
        PoolerDense.read(str(tmp_path / "d"), torch.device("cpu"))
