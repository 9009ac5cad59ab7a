"""Adapters with a key or a tensor changed: servd answers as PEFT does, or refuses them."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from servd.base.errors import ConfigError
from tests.parity.adapters import KINDS, make_adapter, store
from tests.parity.families import make_any
from tests.parity.oracle import PROMPT
from tests.worker.driver import Driver, config_for

peft = pytest.importorskip("peft")

FAMILIES = ("llama", "phi3", "qwen3")
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
TOLERANCE = 2e-3  # of logits
NUM_MUTATIONS = 1000
VALUES = (
    *(True, False, None, 2, 0.5, "all", "q_proj", ["q_proj"], [1], [0, 1], {"q_proj": 2}),
    *({}, -1, 0, []),
)
OTHER_KEYS = ("lora_scale", "target_parameters", "exclude_modules", "layers_pattern", "unknown")
OTHER_NAMES = (
    ("base_model.model.", ""),
    ("lora_A", "lora_B"),
    ("layers.0", "layers.1"),
    ("layers.", "layers.1"),
    (".model.model.", ".model.vision_tower."),
    (".weight", ""),
    ("lora_", "lora_embedding_"),
    ("q_proj", "k_proj"),
    (".lora_A.", ".lora_A.default."),
    ("model.layers", "model.language_model.layers"),
    ("self_attn", "mlp"),
)


def change_key(folder: Path, draw: random.Random) -> str:
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    key = draw.choice(sorted(config))
    kind = draw.choice(("set", "remove", "rename"))
    value = config.pop(key)
    if kind == "set":
        config[key] = value = draw.choice(VALUES)
    elif kind == "rename":
        config[draw.choice(OTHER_KEYS)] = value
    (folder / CONFIG).write_text(json.dumps(config))
    return f"{kind} {key} {value!r:.40}"


def rename_tensor(folder: Path, draw: random.Random) -> str:
    tensors = load_file(folder / TENSORS)
    name = draw.choice(sorted(tensors))
    old, new = draw.choice(OTHER_NAMES)
    tensors[name.replace(old, new)] = tensors.pop(name)
    save_file(tensors, folder / TENSORS)
    return f"{name}: {old} is {new}"


def change_tensor(folder: Path, draw: random.Random) -> str:
    tensors = load_file(folder / TENSORS)
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kind = draw.choice(("float16", "float64", "int8", "twice", "missing", "shorter"))
    if kind == "twice":
        tensors |= {name: tensor, name.replace(".model.model.", ".model."): 2 * tensor}
    elif kind == "shorter":
        tensors[name] = tensor[:, 1:].contiguous()
    elif kind != "missing":
        tensors[name] = tensor.to(getattr(torch, kind))
    save_file(tensors, folder / TENSORS)
    return f"{name} {kind}"


def truncate_file(folder: Path, draw: random.Random) -> str:
    file = folder / draw.choice((CONFIG, TENSORS))
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content))])
    return f"{file.name} truncated"


CHANGES: tuple[Callable[[Path, random.Random], str], ...] = (
    *(change_key, change_key, rename_tensor, change_tensor, truncate_file),
)


def logits_of_servd(driver: Driver, adapter: Path, place: Path) -> torch.Tensor:
    stored = store(place, changed=adapter)["changed"]
    slot = driver.add(PROMPT)
    driver.new[-1] = msgspec.structs.replace(driver.new[-1], adapter=stored)
    driver.generate([slot], 1)
    driver.free(slot)
    return driver.logits[slot][0].clone()


@torch.inference_mode()
def logits_of_peft(base: Path, adapter: Path) -> torch.Tensor | None:
    """Return the logits after the prompt; None if PEFT refuses the adapter."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that are missing
        try:
            adapted = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
        except Exception:  # of any library below it
            return None
        return adapted(torch.tensor([PROMPT])).logits[0, -1]


class Bases:
    """Models with adapters of several kinds."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: make_any(folder / name, name) for name in FAMILIES}
        self.drivers = {
            name: Driver(config_for(base, enable_lora=True, max_lora_rank=64))
            for name, base in self.folders.items()
        }
        self.adapters: list[tuple[str, Path]] = []
        kinds = KINDS | {
            "a layer": {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]}
        }
        for name, base in self.folders.items():
            for seed, (kind, options) in enumerate(kinds.items()):
                make_adapter(base, folder / f"{name} {kind}", options, seed)
                self.adapters.append((name, folder / f"{name} {kind}" / "adapter"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, NUM_MUTATIONS), marks=pytest.mark.slow)], ids=str
)
def test_adapters_with_one_change_are_right_or_refused(bases: Bases, tmp_path: Path, seeds: range):
    wrong: dict[str, str] = {}
    for seed in seeds:
        draw = random.Random(seed)
        family, source = draw.choice(bases.adapters)
        adapter = tmp_path / str(seed)
        shutil.copytree(source, adapter)
        change = f"{seed}: {source.parent.name}, {draw.choice(CHANGES)(adapter, draw)}"
        try:
            logits = logits_of_servd(bases.drivers[family], adapter, tmp_path)
        except ConfigError:
            continue
        expected = logits_of_peft(bases.folders[family], adapter)
        if expected is not None and (distance := (logits - expected).abs().max()) > TOLERANCE:
            wrong[change] = f"{distance:.2g}"
    assert wrong == {}
