"""MXFP4 checkpoints of GPT-OSS: the tokens of transformers with the weights as it reads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from servd.base.errors import UnsupportedModel
from servd.worker.layers.packed import GroupedMatrix
from servd.worker.layers.quantized import QuantizedMatrix
from tests.parity.families import CASES, greedy, make_checkpoint
from tests.worker.driver import Driver, config_for

NAME = "model.layers.0.mlp.experts.down_proj"
PROMPT = [5, 90, 17, 3, 122, 8, 64, 31, 77, 2, 150]


def write(folder: Path, damage: Callable[[dict[str, Tensor]], object] = lambda _: None) -> Path:
    """Writes folder/mxfp4, and folder/plain: the same weights in float32, by transformers."""
    plain = make_checkpoint(folder / "plain", "gpt_oss", CASES["gpt_oss"]["sinks"])
    shutil.copytree(plain, folder / "mxfp4")
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    draw = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, size, num_rows = packed.pop(name).shape
        shape = num_experts, num_rows, size // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=draw)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    damage(packed)
    save_file(packed, folder / "mxfp4" / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "mxfp4" / "config.json").write_text(json.dumps(config))
    return folder / "mxfp4"


def test_tokens_are_those_of_what_the_codes_stand_for(tmp_path: Path):
    driver = Driver(config_for(write(tmp_path)))
    slot = driver.add(PROMPT)
    driver.generate([slot], 12, chunk=5)
    assert driver.tokens[slot] == greedy(tmp_path / "plain", PROMPT, 12)
    weights = dict(driver.worker.runner.model.named_parameters())
    form = weights["model.layers.0.mlp.experts.0.down_proj.weight"].quant_method
    assert isinstance(form, GroupedMatrix | QuantizedMatrix)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(NAME + "_scales"), "the file has only blocks, or only scales"),
        (lambda t: t[NAME + "_scales"][1, 2].fill_(255), "a scale that is not a number"),
        (
            lambda t: t.update({NAME + "_scales": t[NAME + "_scales"][:, :3].clone()}),
            r"blocks \[6, 64, 2, 16\] and scales \[6, 3, 2\], expected",
        ),
        (lambda t: t.update({NAME + "_scales": t[NAME + "_scales"].float()}), "that are not bytes"),
    ],
    ids=["no scales", "NaN", "shape", "type"],
)
def test_what_is_broken_is_refused_by_name(tmp_path, damage, message):
    with pytest.raises(UnsupportedModel, match=f"{NAME}.*{message}"):
        Driver(config_for(write(tmp_path, damage)))
