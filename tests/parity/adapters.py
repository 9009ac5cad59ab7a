"""Random adapters that PEFT makes, and the models that it merges them into."""

import warnings
from pathlib import Path
from typing import Any

import torch

from servd.checkpoint.adapter_store import AdapterStore
from servd.messages.engine import Adapter

# Every way to state which layers, ranks and factors there are.
KINDS: dict[str, dict[str, Any]] = {
    "all layers": {"r": 8, "target_modules": "all-linear", "lora_alpha": 12},
    "patterns": {
        "r": 4,
        "target_modules": r".*\.(q_proj|v_proj|down_proj)",
        "rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 7},
        "alpha_pattern": {r"layers\.0\..*v_proj": 24},
        "lora_alpha": 6,
    },
    "rslora": {"r": 3, "target_modules": ["k_proj", "o_proj", "up_proj"], "use_rslora": True},
}
GPT2_KINDS: dict[str, dict[str, Any]] = {
    "all layers": {"r": 5, "target_modules": "all-linear", "fan_in_fan_out": True},
    "attention": {"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True},
}


def make_adapter(base: Path, folder: Path, options: dict[str, Any], seed: int) -> Path:
    """Write an adapter for `base` to folder/adapter; return both as one model, folder/merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's of what transformers will drop
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.3)
        adapted.save_pretrained(folder / "adapter")
        adapted.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "merged"


def store(folder: Path, **adapters: Path) -> dict[str, Adapter]:
    """The adapters in these folders, as requests name them."""
    at = AdapterStore(folder / "store")
    return {name: at.load(name, str(path), 64, {}) for name, path in adapters.items()}
