"""`servd quantize`: what it writes is what compressed-tensors, transformers and servd read."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from servd import cli
from servd.checkpoint.hub import DEMO_FOLDER
from servd.worker.layers.quantized import Quantized
from tests.conftest import ROOT
from tests.worker.quantization.checkpoints import check, read
from tools.demo_model.corpus import Corpus
from tools.demo_model.train import encode, parse

TEXT = ROOT / "LICENSE"


def quantize(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["quantize", *map(str, args)])
    said = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, said.out if end.value.code == 0 else said.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("int4",), "14 matrices, 53% of the weights, are int4: 4.500 bits each"),
        (("int8",), "14 matrices, 53% of the weights, are int8: 8.500 bits each"),
        # Columns of few layers are whole groups: the others are named as those that stay.
        (("int4", "--group-size", 128), "2 matrices, 12% of the weights, are int4: 4.125 bits"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_transformers_and_servd_read_what_is_written(
    tiny_llama, tmp_path, options, message, capsys
):
    pytest.importorskip("compressed_tensors")
    made = tmp_path / "made"
    more = ("--calibrate", TEXT, "--output", made, "--tokens", 4096)
    code, said = quantize(capsys, tiny_llama, "--to", *options, *more)
    assert code == 0 and re.search(message, said), said
    stated = json.loads((made / "config.json").read_text())["quantization_config"]
    smaller = {name[:-14] for name in load_file(made / "model.safetensors") if "packed" in name}
    assert not smaller & {*stated["ignore"]} and "lm_head" in stated["ignore"]
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    model(torch.tensor([[1]]))  # the package decompresses at the first use
    state = model.state_dict()
    got = {n: x.dequantize() if isinstance(x, Quantized) else x for n, x in read(made).items()}
    for name, weight in got.items():
        torch.testing.assert_close(weight, state[name], rtol=1e-6, atol=1e-7)
    check(made, tiny_llama, got)


def test_gpt2_whose_matrices_are_the_other_way_round(tiny_gpt2, tmp_path, capsys):
    made = tmp_path / "made"
    options = "--to", "int8", "--calibrate", TEXT, "--tokens", 2048, "--output", made
    code, said = quantize(capsys, tiny_gpt2, *options)
    assert code == 0 and "8 matrices" in said
    original = load_file(tiny_gpt2 / "model.safetensors")
    for name, weight in read(made).items():
        meant = original[name]
        if isinstance(weight, Quantized):
            distance = (weight.dequantize() - meant.t()).abs().max()
            assert 0 < distance < 0.02 * meant.abs().max()
        else:
            assert torch.equal(weight, meant)


@pytest.mark.slow
def test_the_demo_model_with_its_own_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    examples = encode(islice(Corpus(parse([]).seed, held_out=True), 80), tokenizer, 1024)
    text = tmp_path / "text"
    made = tmp_path / "made"
    text.write_text("".join(tokenizer.decode(e.ids, skip_special_tokens=False) for e in examples))
    options = "--to", "int4", "--calibrate", text, "--tokens", 12288, "--output", made
    code, said = quantize(capsys, "demo", *options)
    assert code == 0 and "35 matrices" in said
    before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", said))
    assert 1 < before < 200 and 0.98 * before < after < 1.05 * before, said
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (made / "tokenizer.json").read_bytes() == (DEMO_FOLDER / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("kind", "error"), [("int4", 0.08), ("int8", 0.005)])
def test_without_a_text_each_number_is_rounded(tiny_llama, tmp_path, capsys, kind, error):
    made = tmp_path / "made"
    code, said = quantize(capsys, tiny_llama, "--to", kind, "--output", made)
    assert code == 0 and "--calibrate" in said
    original = load_file(tiny_llama / "model.safetensors")
    for name, weight in read(made).items():
        if isinstance(weight, Quantized):
            groups = original[name].unflatten(1, (-1, 32))
            distance = (weight.dequantize().unflatten(1, (-1, 32)) - groups).abs().amax(2)
            share = distance / groups.abs().amax(2)  # half a step, or what the largest is cut by
            assert share.max() < 0.17 and share.mean() < error
        else:
            assert torch.equal(weight, original[name])


def test_files_stay_as_many_as_they_were(tiny_llama, tmp_path, capsys):
    parts = tmp_path / "parts"
    parts.mkdir()
    for file in tiny_llama.iterdir():
        (parts / file.name).write_bytes(file.read_bytes())
    (parts / "model.safetensors").unlink()
    tensors = load_file(tiny_llama / "model.safetensors")
    where = {
        name: f"model-0000{2 if 'mlp' in name else 1}-of-00002.safetensors" for name in tensors
    }
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, parts / file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder, made in ((tiny_llama, "one"), (parts, "two")):
        options = "--to", "int4", "--calibrate", TEXT, "--tokens", 1024, "--output", tmp_path / made
        assert quantize(capsys, folder, *options)[0] == 0
    first, two = ({**read(tmp_path / made)} for made in ("one", "two"))
    assert first.keys() == two.keys()
    written = json.loads((tmp_path / "two/model.safetensors.index.json").read_text())
    for file in set(where.values()):
        assert {n for n, f in written["weight_map"].items() if f == file} == set(
            load_file(tmp_path / "two" / file)
        )


def test_what_cannot_be_is_said(tiny_llama, tmp_path, capsys):
    short = tmp_path / "short.txt"
    bytes_ = tmp_path / "bytes"
    short.write_text("too short")
    bytes_.write_bytes(b"\xff\xfe")
    made = tmp_path / "made"
    for options, message in (
        (("--calibrate", short), "at least"),
        (("--calibrate", bytes_), "this is not UTF-8 text"),
        (("--calibrate", tmp_path / "none"), "No such file"),
        (("--calibrate", TEXT, "--tokens", 5), "--tokens 5 is too few"),
        (("--calibrate", TEXT, "--group-size", 0), "--group-size 0: must be at least 1"),
        (("--calibrate", TEXT, "--group-size", 48), "multiple of 48"),
        (("--calibrate", TEXT, "--output", tmp_path), "exists already"),
    ):
        options = ("--to", "int4", "--output", made, "--tokens", 1024, *options)
        code, said = quantize(capsys, tiny_llama, *options)
        assert code == 2 and message in said, said
        assert not made.exists()
