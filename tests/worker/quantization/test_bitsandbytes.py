"""NF4 checkpoints as bitsandbytes writes them: weights, tokens, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from tests.worker.driver import Driver, config_for
from tests.worker.quantization.checkpoints import Made, check, write

# From the paper (https://arxiv.org/abs/2305.14314), as bitsandbytes has them.
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def nf4(name: str, weight: Tensor, *, nested: bool, block_size: int = 64) -> Made:
    blocks = weight.reshape(-1, block_size)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": block_size,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {"absmax": absmax}
    if nested:
        offset = float(absmax.mean())
        parts = (absmax - offset).split(256)
        table = torch.linspace(-1, 1, 256)
        factors = torch.stack([part.abs().max() for part in parts])
        spread = factors.repeat_interleave(256)[: len(absmax)]
        codes = ((absmax - offset) / spread - table[:, None]).abs().argmin(0).to(torch.uint8)
        absmax = table[codes.int()] * spread + offset
        tensors = {"absmax": codes, "nested_absmax": factors, "nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = (blocks[..., None] / absmax[:, None, None] - NF4).abs().argmin(-1)
    pairs = codes.flatten().to(torch.uint8).view(-1, 2)
    raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {"quant_map": NF4.clone(), "quant_state.bitsandbytes__nf4": raw}
    written = {f".weight.{leaf}": tensor for leaf, tensor in tensors.items()}
    packed = (pairs[:, :1] << 4) | pairs[:, 1:]
    return {".weight": packed} | written, (NF4[codes] * absmax[:, None]).view(weight.shape)


@pytest.mark.parametrize(
    ("model", "nested"), [("tiny_llama", False), ("tiny_llama", True), ("tiny_qwen", True)]
)
def test_nf4_is_what_it_stands_for(model: str, tmp_path: Path, nested: bool, request):
    folder = request.getfixturevalue(model)
    meant = write(folder, tmp_path, CONFIG, partial(nf4, nested=nested))
    check(tmp_path, folder, meant, is_plannable=False)


@pytest.mark.parametrize(
    ("config", "block_size", "message"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, 64, "fp4 of bitsandbytes is not supported, only nf4"),
        ({"load_in_4bit": False}, 64, "int8 of bitsandbytes is not supported, only nf4"),
        ({}, 128, r"q_proj has .* of 128 for a matrix of \[64, 64\]: only blocks that divide"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tiny_llama, tmp_path, config, block_size, message):
    make = partial(nf4, nested=False, block_size=block_size)
    write(tiny_llama, tmp_path, CONFIG | config, lambda n, w: make(n, w) if "q_proj" in n else None)
    with pytest.raises(UnsupportedModel, match=message):
        Driver(config_for(tmp_path))


@pytest.mark.parametrize(
    ("leaf", "damage", "message"),
    [
        ("quant_map", lambda t: t[:8], "q_proj has a quant_map that is not 16 numbers"),
        ("quant_map", lambda t: t * torch.nan, "q_proj has a quant_map that is not 16 numbers"),
        ("absmax", lambda t: t * torch.inf, "q_proj has a scale that is not a finite number"),
        ("quant_state.bitsandbytes__nf4", lambda t: t[:0], "q_proj has a state of NF4"),
        ("quant_state.bitsandbytes__nf4", lambda t: t.new_full((100_000,), ord("[")), "q_proj"),
    ],
)
def test_a_damaged_layer_is_refused_by_name(tiny_llama, tmp_path, leaf, damage, message):
    def damaged(name: str, weight: Tensor) -> Made | None:
        if "q_proj" not in name:
            return None
        tensors, meant = nf4(name, weight, nested=False)
        return tensors | {f".weight.{leaf}": damage(tensors[f".weight.{leaf}"])}, meant

    write(tiny_llama, tmp_path, CONFIG, damaged)
    with pytest.raises(UnsupportedModel, match=message):
        Driver(config_for(tmp_path))
