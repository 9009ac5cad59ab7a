"""Blocks of GGUF: every type is exactly what ggml's own Python package makes of the same bytes."""

from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from servd.base.errors import UnsupportedModel  # noqa: E402
from servd.worker.layers.packed import GroupedMatrix  # noqa: E402
from servd.worker.layers.quantized import Quantized  # noqa: E402
from servd.worker.ops import native  # noqa: E402
from servd.worker.quantization.gguf import BLOCKS, read  # noqa: E402

# The most bits of a weight in memory, and where codes have 6 bits.
BITS = {"Q2_K": 5.2, "Q3_K": 4.6, "Q4_K": 4.7, "Q5_K": 8.7, "Q6_K": 8.7}
BITS_OF_SIXES = BITS | {"Q5_K": 6.7, "Q6_K": 6.7}
QUANTS = [gguf.GGMLQuantizationType[name] for name in BLOCKS]


def halves_of(quant: gguf.GGMLQuantizationType) -> tuple[int, ...]:
    """Where a block has its 16-bit floats."""
    if quant.name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"):
        return (0,)
    return {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(quant.name, (0, 2))


def random_blocks(quant: gguf.GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    """Bytes of any value, but for the 16-bit floats, which are finite."""
    random = np.random.default_rng(int(quant))
    _, size = gguf.GGML_QUANT_SIZES[quant]
    data = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in halves_of(quant):
        numbers = random.normal(size=(rows, blocks, 1)).astype(np.float16)
        data[..., at : at + 2] = numbers.view(np.uint8)
    if quant.name == "MXFP4":
        data[..., 0] = random.integers(0, 140, (rows, blocks))  # tiny ones too
    return data.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, (data, quant) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
def test_blocks_are_what_the_format_says(tmp_path: Path, quant: gguf.GGMLQuantizationType):
    data = random_blocks(quant, rows=5, blocks=3)
    write(tmp_path / "model.gguf", {"output.weight": (data, quant)})
    [(name, tensor)] = read([tmp_path / "model.gguf"], {}, torch.device("cpu"))
    assert name == "lm_head.weight" and isinstance(tensor, Quantized)
    expected = torch.from_numpy(gguf.quants.dequantize(data, quant))
    assert torch.equal(tensor.dequantize(), expected)
    for start, size in ((0, 32), (256, 512), (320, 64)):
        if start + size <= expected.shape[1]:
            part = tensor.narrow(1, start, size)
            assert torch.equal(part.dequantize(), expected[:, start : start + size])


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
def test_packed_weights_are_those_of_the_file_and_little_larger(tmp_path: Path, quant, x_dtype):
    data = random_blocks(quant, rows=64, blocks=6)
    write(tmp_path / "model.gguf", {"output.weight": (data, quant)})
    [(_, tensor)] = read([tmp_path / "model.gguf"], {}, torch.device("cpu"))
    assert isinstance(tensor, Quantized)
    packed = GroupedMatrix(tensor, x_dtype)
    expected = torch.from_numpy(gguf.quants.dequantize(data, quant))
    assert torch.equal(packed.rows(torch.arange(64)), expected)
    bits = BITS_OF_SIXES if packed.type == native.INT6 else BITS
    if quant.name in BITS:
        assert packed.nbytes * 8 <= bits[quant.name] * expected.numel() + 8 * 64  # and a table
        assert tensor.nbytes < 1.2 * expected.numel()


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
def test_scales_that_are_no_finite_numbers_are_refused(tmp_path: Path, quant):
    _, size = gguf.GGML_QUANT_SIZES[quant]
    for at in halves_of(quant) or (0,):
        data = random_blocks(quant, rows=2, blocks=3)
        data[1, size + at : size + at + 2] = (0, 0x7C)  # infinity
        if quant.name == "MXFP4":
            data[1, size] = 255
        write(tmp_path / "model.gguf", {"output.weight": (data, quant)})
        with pytest.raises(UnsupportedModel, match=r"output\.weight has a scale"):
            [*read([tmp_path / "model.gguf"], {}, torch.device("cpu"))]


def test_an_empty_tensor_is_refused(tmp_path: Path):
    empty = np.zeros((2, 0), dtype=np.uint8)
    write(tmp_path / "model.gguf", {"output.weight": (empty, gguf.GGMLQuantizationType.Q8_0)})
    with pytest.raises(UnsupportedModel, match=r"output\.weight is empty"):
        [*read([tmp_path / "model.gguf"], {}, torch.device("cpu"))]
