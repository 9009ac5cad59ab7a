"""Tiny checkpoints as quantizers write them, and what transformers answers with their weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from servd.base import plugins
from servd.checkpoint.model_spec import read_spec
from servd.checkpoint.quantization_config import quantization_of
from servd.checkpoint.weight_files import find_weight_files
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import MakeQuantMethod, Matrix
from servd.worker.layers.quantized import Quantized
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from servd.worker.runner.dry_run import load as load_dry
from tests.worker.driver import Driver, config_for

Made = tuple[dict[str, Tensor], Tensor]
"""Tensors by what the layer's name is followed by, and the weight [out, in] that they stand for."""
PROMPTS = ([5, 17, 99, 200, 31, 8, 44, 3], [1], list(range(40, 75)))


def write(
    folder: Path,
    to: Path,
    config: dict[str, Any] | None,
    make: Callable[[str, Tensor], Made | None],
) -> dict[str, Tensor]:
    """Write one like `folder`, projections by `make`. Returns what all weights stand for."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    stated = json.loads((folder / "config.json").read_text())
    stated |= {"quantization_config": config} if config else {}
    (to / "config.json").write_text(json.dumps(stated))
    written = {}
    meant = load_file(folder / "model.safetensors")
    for name, tensor in list(meant.items()):
        stem = name.removesuffix(".weight")
        made = make(stem, tensor.float()) if stem.endswith("_proj") else None
        if made is None:
            written[name] = tensor
        else:
            written |= {stem + leaf: part.contiguous() for leaf, part in made[0].items()}
            meant[name] = made[1]
    save_file(written, to / "model.safetensors")
    return meant


def read(folder: Path) -> dict[str, Tensor | Quantized]:
    """What servd reads of a checkpoint."""
    config = quantization_of(folder)
    assert config
    module = plugins.load("servd.worker.quantization", config["quant_method"], "read")
    return dict(module(find_weight_files(folder), config, torch.device("cpu")))


def check(
    folder: Path, original: Path, meant: dict[str, Tensor], is_plannable: bool = True
) -> None:
    """Weights are those that are meant, bit by bit, and tokens those of transformers with them; the
    plan knows how much memory they take, from headers alone where it `is_plannable`.
    """
    got = {n: x.dequantize() if isinstance(x, Quantized) else x for n, x in read(folder).items()}
    assert got.keys() == meant.keys()
    for name, expected in meant.items():
        assert torch.equal(got[name], expected), name
    reference = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    reference.load_state_dict({k: v.float() for k, v in meant.items()}, strict=False)
    config = config_for(folder, block_size=16)
    driver = Driver(config)
    for prompt in PROMPTS:
        slot = driver.add(prompt)
        driver.generate([slot], 12)
        assert driver.free(slot)[: len(prompt) + 12] == greedy(reference, prompt, 12)
    runner = driver.worker.runner
    assert isinstance(runner, CPUModelRunner)
    assert runner.graphs is None or (runner.graphs.is_recordable and runner.graphs.graphs)
    num_bytes = runner.weights_bytes
    assert num_bytes < sum(tensor.nbytes for tensor in meant.values())
    for planned in (folder, _hollow(folder)) if is_plannable else (folder,):
        runner = load_dry(CPUModelRunner, config, read_spec(planned), torch.device("cpu"))
        assert runner.weights_bytes == num_bytes


def _hollow(folder: Path) -> Path:
    """What a plan has of a model on the hub: headers of weights, and a hole."""
    (made := folder / "hollow").mkdir()
    (made / "config.json").write_bytes((folder / "config.json").read_bytes())
    [file] = find_weight_files(folder)
    data = file.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    (made / file.name).write_bytes(header.ljust(len(data), b"\0"))
    return made


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The prompt and the most likely tokens after it."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            logits = model(tokens).logits[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens[0].tolist()


def pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, codes] -> int32 [rows, words]: bits i * `bits` of a word are code `order[i]`."""
    per_word = 32 // bits
    words = codes.to(torch.int64).unflatten(1, (-1, per_word))[..., order or tuple(range(per_word))]
    total = sum(words[..., place] << bits * place for place in range(per_word))
    return (total - ((total >> 31) << 32)).to(torch.int32)


def check_slices(folder: Path, shard_dim: int) -> None:
    """Two ranks with a slice each of a layer make the whole product."""
    whole = read(folder)["model.layers.0.mlp.gate_proj.weight"]
    assert isinstance(whole, Quantized)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    parts = []
    for rank in range(2):
        matrix = Matrix(whole.shape, Parallel(rank, 2), shard_dim=shard_dim)
        matrix.load(whole)
        matrix.process_weights(MakeQuantMethod(lambda _: None))
        parts.append(matrix.product(x.chunk(2, dim=1)[rank].contiguous() if shard_dim else x))
    got = parts[0] + parts[1] if shard_dim else torch.cat(parts, dim=1)
    torch.testing.assert_close(got, x @ whole.dequantize().t())


def change_layer(folder: Path, leaves: dict[str, Tensor | None]) -> None:
    """Replace tensors of one layer of a checkpoint, or take them away."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for leaf, tensor in leaves.items():
        name = f"model.layers.0.mlp.up_proj.{leaf}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)
