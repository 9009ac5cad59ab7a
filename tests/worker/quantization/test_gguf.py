"""GGUF files: what transformers makes of the same file, its tokenizer, and what is refused."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

gguf = pytest.importorskip("gguf")

from servd.api.text.tokenizer import Tokenizer  # noqa: E402
from servd.base.errors import ConfigError, ModelNotFound, UnsupportedModel  # noqa: E402
from servd.checkpoint import gguf as servd_gguf  # noqa: E402
from servd.checkpoint import hub, model_spec, weight_files  # noqa: E402
from servd.checkpoint.facts import read_facts  # noqa: E402
from servd.worker.layers import packed  # noqa: E402
from servd.worker.layers._matrix import Matrix  # noqa: E402
from servd.worker.ops import native  # noqa: E402
from servd.worker.quantization.gguf import rename  # noqa: E402
from servd.worker.runner import dry_run  # noqa: E402
from servd.worker.runner.cpu_model_runner import CPUModelRunner  # noqa: E402
from tests.gguf_files import Quant, bpe_vocabulary, write_model  # noqa: E402
from tests.worker.driver import Driver, config_for  # noqa: E402

SMOLLM2 = Path.home() / ".cache/servd-tests/smollm2"
# Different types in one layer, as of Q4_K_M, and one that stays as it is.
TYPES = {"attn_v": Quant.Q8_0, "attn_k": Quant.Q5_0, "ffn_up": Quant.F16, "token_embd": Quant.Q5_1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_gguf(path: Path, folder: Path, **changed: Any) -> Path:
    """A Llama checkpoint as llama.cpp's converter would write it, quantized."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocabulary = bpe_vocabulary(folder / "tokenizer.json", changed.pop("pre", "gpt-2"))
    vocabulary |= {
        "ggml.bos_token_id": vocabulary["ggml.tokens"].index("<s>"),
        "ggml.eos_token_id": vocabulary["ggml.tokens"].index("<|im_end|>"),
        "chat_template": "{{ messages[0].content }}",
    }
    return write_model(path, model, Quant.Q4_1, TYPES, vocabulary, **changed)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(count):
        logits = model(tokens).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens[0].tolist()


def test_tokens_equal_those_of_transformers_on_the_dequantised_weights(tiny_llama, tmp_path):
    file = write_gguf(tmp_path / "tiny.Q4_1.gguf", tiny_llama)
    folder = hub.find_model(str(tmp_path) + ":q4_1")
    assert hub.find_model(str(file)) == folder, "made once"
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).eval()
    driver = Driver(config_for(folder, block_size=16, cpu_activation_dtype="float32"))
    for prompt in ([5, 17, 99, 200, 31, 8, 44, 3], [1], list(range(40, 75))):
        slot = driver.add(prompt)
        driver.generate([slot], 12)
        assert driver.free(slot)[: len(prompt) + 12] == greedy(reference, prompt, 12)


def test_a_plan_reads_no_memory_that_nobody_wrote(tiny_llama, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.Q4_1.gguf", tiny_llama)
    folder = str(hub.find_model(str(file)))
    config = config_for(folder, block_size=16)
    spec = model_spec.read_spec(folder)
    monkeypatch.setattr(np, "empty_like", lambda x: np.full_like(x, np.nan if x.ndim == 1 else 0))
    dry_run.load(CPUModelRunner, config, spec, torch.device("cpu"))


def test_a_plan_does_not_import_what_torch_compiles_with(tiny_llama, tmp_path):
    """It takes half a second, for which every start would wait."""
    file = write_gguf(tmp_path / "tiny.Q4_1.gguf", tiny_llama)
    command = [sys.executable, "-X", "importtime", "-m", "servd", "plan", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "torch" in modules and "sympy" not in modules


@pytest.mark.parametrize(
    ("quant", "num_terms", "kv_dtype"),
    [(Quant.Q4_1, 1, torch.bfloat16), (Quant.F16, packed.EXACT_TERMS, torch.float32)],
    ids=["blocks", "floats"],
)
def test_activations_are_rounded_only_beside_blocks(
    tiny_llama: Path, tmp_path: Path, quant, num_terms, kv_dtype
):
    if native.library() is None:
        pytest.skip("no compiled kernels: activations are float32 with torch's products")
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    path = write_model(tmp_path / "tiny.gguf", model, quant)
    runner = Driver(config_for(hub.find_model(str(path)), block_size=16)).worker.runner
    weights = [
        weight for _, weight in runner.model.named_parameters() if isinstance(weight, Matrix)
    ]
    assert {weight.quant_method.num_terms for weight in weights} == {num_terms}
    assert {cache.dtype for cache in runner.kv_caches} == {kv_dtype}


def test_the_plan_knows_what_it_takes(tiny_llama: Path, tmp_path: Path, monkeypatch):
    memmap = np.memmap
    modes = set[str]()

    def map_file(path: Path, mode: str) -> Any:
        modes.add(mode)
        return memmap(path, mode=mode)

    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama)
    with monkeypatch.context() as patch:
        patch.setattr(np, "memmap", map_file)
        folder = hub.find_model(str(path))
        config = config_for(folder)
        spec = model_spec.read_spec(folder)
        planned = dry_run.load(CPUModelRunner, config, spec, torch.device("cpu"))
    assert modes == {"r"}, "Linux refuses private maps of more than memory"
    runner = Driver(config).worker.runner
    assert planned.weights_bytes == runner.weights_bytes < 300_000


def test_tokenizer_and_template_are_those_of_the_file(tiny_llama: Path, tmp_path: Path):
    folder = hub.find_model(str(write_gguf(tmp_path / "tiny.gguf", tiny_llama)))
    tokenizer = Tokenizer.load(str(folder))
    original = Tokenizer.load(str(tiny_llama))
    assert tokenizer.encode("<|im_start|>x") == original.encode("<|im_start|>x", False)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|im_end|>")
    assert tokenizer.config["chat_template"] == "{{ messages[0].content }}"
    ends = [tokenizer.eos_token_id, tokenizer.token_id("</s>")]
    assert model_spec.read_spec(folder).eos_token_ids == ends


def test_what_cannot_be_read_is_refused_by_name(tiny_llama: Path, tmp_path: Path):
    with pytest.raises(UnsupportedModel, match="architecture 'mamba' is not supported, only llama"):
        hub.find_model(str(write_gguf(tmp_path / "a.gguf", tiny_llama, architecture="mamba")))
    folder = hub.find_model(str(write_gguf(tmp_path / "b.gguf", tiny_llama, pre="new")))
    with pytest.raises(ModelNotFound, match=r"pre-tokenizer 'new'.*set --tokenizer"):
        Tokenizer.load(str(folder))
    with pytest.raises(ConfigError, match="quantized already, by gguf: leave the option out"):
        Driver(config_for(folder, quantization="int8"))
    (tmp_path / "c.gguf").write_bytes(b"GGUF\x03\0\0\0torn")
    with pytest.raises(ModelNotFound, match=r"c\.gguf cannot be read as GGUF"):
        hub.find_model(str(tmp_path / "c.gguf"))
    whole = (tmp_path / "b.gguf").read_bytes()
    (tmp_path / "c.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelNotFound, match=r"c\.gguf cannot be read as GGUF"):
        hub.find_model(str(tmp_path / "c.gguf"))
    (tmp_path / "c.gguf").write_bytes(whole[:24] + b"\xff" * 8 + whole[32:])
    with pytest.raises(ModelNotFound, match=r"c\.gguf cannot be read as GGUF"):
        hub.find_model(str(tmp_path / "c.gguf"))
    with pytest.raises(
        ModelNotFound, match=r"matches 3 files, must match one; the folder has a\.gguf"
    ):
        hub.find_model(f"{tmp_path}:gguf")
    with pytest.raises(ModelNotFound, match=r"it has a\.gguf: name that file"):
        weight_files.find_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", "x"),
        ("general.architecture", ["llama"]),
        ("split.count", "2"),
        ("split.count", 2),
        ("llama.block_count", None),
        ("llama.attention.head_count_kv", [2, 2]),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.attention.head_count", True),
        ("llama.attention.head_count", 1 << 40),
        ("llama.feed_forward_length", -1),
        ("llama.feed_forward_length", 3.5),
        ("llama.rope.freq_base", "x"),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.dimension_count", "x"),
        ("llama.rope.scaling.type", ["yarn"]),
        ("llama.rope.scaling.type", "new"),
        ("tokenizer.ggml.eos_token_id", "x"),
        ("tokenizer.ggml.tokens", 5),
        ("tokenizer.ggml.merges", 3),
        ("tokenizer.ggml.pre", ["x"]),
        ("tokenizer.ggml.token_type", [3]),
    ],
)
def test_metadata_of_another_kind_is_refused_in_words(
    tiny_llama, tmp_path, key, value, monkeypatch
):
    path = write_gguf(tmp_path / "a.gguf", tiny_llama)
    open_file = servd_gguf.open_file

    def open_changed(path: Path) -> Any:
        reader, values = open_file(path)
        return reader, values | {key: value}

    monkeypatch.setattr(servd_gguf, "open_file", open_changed)
    with pytest.raises((ModelNotFound, UnsupportedModel)):
        Tokenizer.load(str(hub.find_model(str(path))))


@pytest.mark.parametrize(
    ("quant", "factors"),
    [
        (Quant.F32, np.array([1, 0], np.float32)),
        (Quant.F32, np.array([1, -1], np.float32)),
        (Quant.F32, np.array([1, np.nan], np.float32)),
        (Quant.F32, np.array([1, np.inf], np.float32)),
        (Quant.BF16, np.array([128, 63], np.uint8)),
    ],
    ids=["zero", "negative", "nan", "infinity", "bfloat16"],
)
def test_rope_factors_are_floats_above_zero(tiny_llama, tmp_path, monkeypatch, quant, factors):
    path = write_gguf(tmp_path / "a.gguf", tiny_llama)
    open_file = servd_gguf.open_file

    def open_changed(path: Path) -> Any:
        reader, values = open_file(path)
        name = "rope_freqs.weight"
        added = reader.tensors[0]._replace(name=name, tensor_type=quant, data=factors)
        reader.tensors.append(added)
        return reader, values

    monkeypatch.setattr(servd_gguf, "open_file", open_changed)
    with pytest.raises(ModelNotFound, match="its metadata is incomplete or wrong"):
        hub.find_model(str(path))
    factors = np.ones(8, np.float32)
    quant = Quant.F32
    assert hub.find_model(str(path))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (struct.pack("<QQ", 1 << 18, 0), "262144 tensors"),
        (struct.pack("<QQQsIQ", 0, 1, 1, b"a", 8, 1 << 30), "1073741824 bytes"),
        (struct.pack("<QQQsIIQQ", 0, 1, 1, b"a", 9, 8, 1, 1 << 30), "1073741824 bytes"),
    ],
    ids=["tensors", "text", "list of texts"],
)
def test_a_header_of_impossible_sizes_is_refused(tmp_path, header, reason):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + header)
    os.truncate(path, 2 << 30)
    with pytest.raises(ModelNotFound, match=f"cut off or damaged: .*{reason}"):
        hub.find_model(str(path))


@pytest.mark.parametrize("kind", [4, 8, 9], ids=["numbers", "texts", "lists"])
def test_a_gguf_list_longer_than_its_file_is_refused(tmp_path, kind):
    begin = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a"
    (tmp_path / "a.gguf").write_bytes(begin + struct.pack("<IIQ", 9, kind, 1 << 40) + bytes(64))
    with pytest.raises(ModelNotFound, match="cut off or damaged"):
        hub.find_model(str(tmp_path / "a.gguf"))


def test_an_expert_that_is_unknown_keeps_its_name():
    assert rename("blk.0.ffn_up.1.weight", "llama") != rename("blk.0.ffn_up.2.weight", "llama")
    assert rename("blk.0.foo.1.weight", "llama") == "model.layers.0.foo.1.weight"


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused_in_words(tiny_llama: Path, tmp_path: Path, share: float):
    path = write_gguf(tmp_path / "model.gguf", tiny_llama)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelNotFound, match="cut off or damaged"):
        Driver(config_for(hub.find_model(str(path))))


def test_a_model_in_parts_is_read_from_all_of_them(tiny_llama: Path, tmp_path: Path):
    whole = write_gguf(tmp_path / "whole.gguf", tiny_llama)
    write_gguf(tmp_path / "split.gguf", tiny_llama, split=5)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 5
    folder = hub.find_model(f"{tmp_path}:split")
    assert folder == hub.find_model(str(parts[0])) == hub.find_model(str(parts[3]))
    single_file = hub.find_model(str(whole))
    assert read_facts(str(folder)).num_parameters == read_facts(str(single_file)).num_parameters
    drivers = [Driver(config_for(path)) for path in (folder, single_file)]
    for driver in drivers:
        driver.generate([driver.add([5, 17, 99, 200])], 12)
    assert drivers[0].tokens == drivers[1].tokens
    parts[2].unlink()
    with pytest.raises(ModelNotFound, match=r"lacks 1 of 5 weight files: split-00003-of"):
        hub.find_model(str(parts[0]))
    for part in parts[:2]:
        (tmp_path / "alone.gguf").write_bytes(part.read_bytes())
        with pytest.raises(ModelNotFound, match=r"alone.gguf is one of 5 files: name them"):
            hub.find_model(str(tmp_path / "alone.gguf"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "two of its files have the same tensor"),
        ({"split.no": 0}, "00002-of-00002.gguf is one of 2 files: name them"),
        ({"split.count": 3}, "00002-of-00002.gguf is one of 3 files: name them"),
        ({"general.architecture": "qwen2"}, "00002-of-00002.gguf is one of 2 files: name them"),
    ],
    ids=["tensors", "number", "count", "architecture"],
)
def test_parts_of_several_models_are_refused(tiny_llama, tmp_path, monkeypatch, changed, message):
    first = write_gguf(tmp_path / "a-00001-of-00002.gguf", tiny_llama)
    second = shutil.copy(first, tmp_path / "a-00002-of-00002.gguf")
    open_file = servd_gguf.open_file

    def open_changed(path: Path) -> Any:
        reader, values = open_file(path)
        if path == second:
            return reader, values | {"split.count": 2, "split.no": 1} | changed
        return reader, values | {"split.count": 2, "split.no": 0}

    monkeypatch.setattr(servd_gguf, "open_file", open_changed)
    with pytest.raises(ModelNotFound, match=message):
        hub.find_model(str(first))


def chats(count: int) -> list[str]:
    starts = ["What is", "Tell me about", "Write a line on", "Why is there", "Explain 17 times"]
    things = ["rain", "Paris", "a cat", "the year 1984", "sorting", "tea", "light", "music"]
    ends = ["?", ", briefly.", " in one word.", "!", " to a child."]
    made = [f"{s} {t}{e}" for s in starts for t in things for e in ends]
    step = len(made) // count
    return made[:: max(step, 1)][:count]


@pytest.mark.skipif(not (SMOLLM2 / "hf").exists(), reason="no SmolLM2: get_smollm2.py")
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_a_published_file_answers_as_its_dequantised_weights_do(count: int):
    folder = hub.find_model(str(next(SMOLLM2.glob("*.gguf"))))
    reference = AutoModelForCausalLM.from_pretrained(SMOLLM2 / "hf", dtype=torch.float32).eval()
    sizes = {"kv_cache_memory": 1 << 27, "max_model_len": 256, "max_num_batched_tokens": 256}
    driver = Driver(config_for(folder, block_size=16, cpu_activation_dtype="float32", **sizes))
    tokenizer = Tokenizer.load(str(folder))
    for text in chats(count):
        turns = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(turns, add_special_tokens=False)
        slot = driver.add(prompt)
        driver.generate([slot], 16)
        got = driver.free(slot)[: len(prompt) + 16]
        with torch.inference_mode():
            logits = reference(torch.tensor([got[:-1]])).logits[0, len(prompt) - 1 :]
        assert got[len(prompt) :] == logits.argmax(-1).tolist(), text
