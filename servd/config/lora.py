"""The options of LoRA adapters."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import Positive, Section


class LoRAConfig(Section, frozen=True):
    """LoRA adapters."""

    enable_lora: bool = False
    """Serve LoRA adapters. Requests choose one with `model`."""
    max_loras: Positive = 1
    """Maximum adapters in one step."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Maximum rank of an adapter. Memory for adapters grows with it."""
    max_cpu_loras: Positive | None = None
    """Number of recently used adapters that stay in main memory. Default: --max-loras."""
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the adapter weights. auto: the type of the activations."""
    lora_modules: list[str] = []
    """Adapters to load at the start: NAME=FOLDER, or JSON with `name` and `path`."""
    lora_dir: str | None = None
    """Folder with a subfolder per adapter. At run time, servd loads adapters only from here, when a
    request or `/v1/load_lora_adapter` names one. Default: no loading at run time.
    """

    @property
    def num_adapter_slots(self) -> int:
        """The number of adapters that the workers hold at once."""
        return self.max_loras if self.enable_lora else 0
