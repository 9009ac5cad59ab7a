"""Adapters as files, without PEFT."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def write_adapter(
    folder: Path, seed: int = 0, shapes: dict[str, tuple[int, int]] | None = None, **config: Any
) -> Path:
    """Write an adapter with a tensor of each of the shapes; by default one of rank 4 of q_proj."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    shapes = shapes or {f"{Q_PROJ}.lora_A.weight": (4, 8), f"{Q_PROJ}.lora_B.weight": (6, 4)}
    tensors = {name: draw.random(shape, dtype=np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    supported = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(supported | config))
    return folder
