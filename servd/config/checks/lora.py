"""Checks the options of adapters."""

import os

import msgspec

from servd.base.errors import ConfigError
from servd.checkpoint.lora import parse_module
from servd.config import Config, LoRAConfig, flag_of


def check_adapters(config: Config) -> None:
    lora = config.lora
    if not lora.enable_lora:
        flags = [
            flag_of(name)
            for name, default in msgspec.structs.asdict(LoRAConfig()).items()
            if getattr(lora, name) != default
        ]
        if flags:
            raise ConfigError(f"{', '.join(flags)}: add --enable-lora")
    if lora.enable_lora and config.model.compile:
        raise ConfigError("--compile cannot compile layers with adapters: leave out --enable-lora")
    if lora.lora_dir is not None and not os.path.isdir(lora.lora_dir):
        raise ConfigError(f"--lora-dir {lora.lora_dir}: the folder does not exist")
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {lora.max_cpu_loras} is below --max-loras {lora.max_loras}"
        )
    for entry in lora.lora_modules:
        name, _ = parse_module(entry)
        if name in config.model.served_model_name:
            raise ConfigError(f"--lora-modules {entry}: that is the name of the model itself")
