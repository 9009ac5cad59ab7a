"""Folders of models with a key, a file or a tensor changed: servd answers as transformers does, or
refuses to start with a sentence. Another answer without a word, or a traceback, is a fault.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.families import CASES, ENCODERS, make_any
from tests.parity.oracle import compare

NUM_MUTATIONS = 1000
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def save(folder: Path, tensors: Tensors, name: str = WEIGHTS) -> None:
    copies = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
    save_file(copies, folder / name, {"format": "pt"})


def shifted(tensors: Tensors) -> Tensors:
    """Return tensors of another model of the same shape."""
    return {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in tensors.items()}


# ---- keys ----


def add_key(folder: Path, draw: random.Random) -> str:
    """Add a key that some model of transformers has."""
    names = ("mistral", "qwen3", "gemma2", "smollm3", "granite", "deepseek_v3", "gpt2", "bert")
    other = transformers.CONFIG_MAPPING[draw.choice(names)]().to_dict()
    key = draw.choice(sorted(other))
    value = draw.choice((other[key], True, False, 2, 0.5, "linear", [1], {"rope_theta": 7.0}))
    write_config(folder, read_config(folder) | {key: value})
    return f"{key} = {value!r:.60}"


def remove_key(folder: Path, draw: random.Random) -> str:
    config = read_config(folder)
    key = draw.choice(sorted(config))
    del config[key]
    write_config(folder, config)
    return key


def move_key(folder: Path, draw: random.Random) -> str:
    """Move a key into or out of the rotation, or to another name."""
    config = read_config(folder)
    rotation = config.get("rope_parameters") or {}
    if draw.random() < 0.4 and rotation:
        key = draw.choice(sorted(rotation))
        config[key] = rotation.pop(key)
        write_config(folder, config)
        return f"{key} out of the rotation"
    if draw.random() < 0.5 and rotation:
        place = draw.choice(("rope_scaling", "rotary", "text_config"))
        config[place] = config.pop("rope_parameters")
        write_config(folder, config)
        return f"rope_parameters to {place}"
    key = draw.choice(sorted(config))
    name = draw.choice((f"n_{key}", f"text_{key}", key.upper(), "head_dim", "num_experts"))
    config[name] = config.pop(key)
    write_config(folder, config)
    return f"{key} to {name}"


def retype_key(folder: Path, draw: random.Random) -> str:
    config = read_config(folder)
    key = draw.choice(sorted(config))
    value = config[key]
    change = draw.choice((str, bool, lambda x: [x], lambda x: {"value": x}, lambda x: None))
    config[key] = change(value)
    write_config(folder, config)
    return f"{key} = {config[key]!r:.60}"


# ---- files ----


def add_file(folder: Path, draw: random.Random) -> str:
    name = draw.choice(
        (
            "consolidated.safetensors",
            "adapter_model.safetensors",
            "model.fp16.safetensors",
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
            "generation_config.json",
            "pytorch_model.bin",
            "quantize_config.json",
        )
    )
    tensors = load_file(folder / WEIGHTS)
    if name.endswith(".safetensors"):
        save(folder, shifted(tensors), name)
    elif name.endswith("index.json"):
        save(folder, shifted(tensors), "model-00001-of-00001.safetensors")
        weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    elif name == "generation_config.json":
        ids = draw.choice(([2, 4999], "2", [[2]], -1, None, 1.5))
        (folder / name).write_text(json.dumps({"eos_token_id": ids}))
    elif name == "quantize_config.json":
        (folder / name).write_text(json.dumps({"bits": 4, "group_size": 32}))
    else:
        torch.save(shifted(tensors), folder / name)
    return name


def rename_file(folder: Path, draw: random.Random) -> str:
    name = draw.choice(
        (
            "model-00001-of-00001.safetensors",
            "weights.safetensors",
            "model-00001-of-00002.safetensors",
        )
    )
    (folder / WEIGHTS).rename(folder / name)
    if draw.random() < 0.5:
        tensors = load_file(folder / name)
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
        if draw.random() < 0.3:
            del index["weight_map"][draw.choice(sorted(tensors))]
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        name += " with an index"
    return name


def truncate_file(folder: Path, draw: random.Random) -> str:
    file = folder / draw.choice((WEIGHTS, "config.json"))
    content = file.read_bytes()
    share = draw.random()
    file.write_bytes(content[: int(share * len(content))])
    return f"{file.name} at {share:.3f}"


# ---- tensors ----


def choose_tensor(tensors: Tensors, draw: random.Random, names: tuple[str, ...]) -> list[str]:
    """Return a tensor's name, and another: with fewer or more prefixes, or one of `others`."""
    name = draw.choice(sorted(tensors))
    short = name.removeprefix("model.").removeprefix("transformer.")
    prefixes = ("", "model.model.", "vision_tower.", "language_model.model.", "module.")
    return [name, draw.choice((*(f"{prefix}{short}" for prefix in prefixes), *names))]


def rename_tensor(folder: Path, draw: random.Random) -> str:
    tensors = load_file(folder / WEIGHTS)
    name, other = choose_tensor(tensors, draw, ("model.old.weight",))
    if ".experts." in name:  # transformers counts experts, and does not read their numbers
        other = "model.old.weight"
    tensors[other] = tensors.pop(name)
    save(folder, tensors)
    return f"{name} to {other}"


def double_tensor(folder: Path, draw: random.Random) -> str:
    tensors = load_file(folder / WEIGHTS)
    name, other = choose_tensor(tensors, draw, ("lm_head.weight", "score.weight"))
    tensors[other] = tensors[name] + 0.3 * torch.randn_like(tensors[name])
    save(folder, tensors)
    return f"{name} as {other}"


def retype_tensor(folder: Path, draw: random.Random) -> str:
    tensors = load_file(folder / WEIGHTS)
    name = draw.choice(sorted(tensors))
    kind = draw.choice((torch.float64, torch.float8_e4m3fn, torch.bfloat16, torch.float16))
    if ".gate." not in name:  # of a router: whole numbers choose all experts alike
        kind = draw.choice((kind, torch.int32, torch.uint8, torch.bool))
    tensors[name] = tensors[name].to(kind)
    save(folder, tensors)
    return f"{name} as {kind}"


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    add_key,
    remove_key,
    move_key,
    retype_key,
    add_file,
    rename_file,
    truncate_file,
    rename_tensor,
    double_tensor,
    retype_tensor,
)


def wrongs(folders: dict[str, Path], place: Path, seeds: range) -> dict[str, str]:
    """Return the mutations of these seeds after which servd answers otherwise, or fails."""
    wrong: dict[str, str] = {}
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model_type = draw.choice(sorted(folders))
        folder = place / str(seed)
        shutil.copytree(folders[model_type], folder)
        kind = draw.choice(KINDS)
        name = f"{seed}: {model_type}, {kind.__name__} {kind(folder, draw)}"
        try:
            outcome, details = compare(folder)
        except Exception as error:
            outcome = "different"
            details = repr(error)
        if outcome == "different":
            wrong[name] = details
        shutil.rmtree(folder)
    return wrong


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """model_type -> a valid folder."""
    made = tmp_path_factory.mktemp("valid")
    return {name: make_any(made / name, name) for name in sorted(CASES | ENCODERS)}


def test_valid_folders_with_one_change_are_right_or_refused(
    folders: dict[str, Path], tmp_path: Path
):
    assert wrongs(folders, tmp_path, range(60)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("start", range(60, NUM_MUTATIONS, 94))
def test_many_folders_with_one_change_are_right_or_refused(
    folders: dict[str, Path], tmp_path: Path, start: int
):
    assert wrongs(folders, tmp_path, range(start, start + 94)) == {}
