"""The options of LoRA adapters."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import Positive, Section, about


class LoRAConfig(Section, frozen=True):
    """LoRA adapters."""

    enable_lora: Annotated[
        bool, about("Serve LoRA adapters. Requests choose one with `model`.")
    ] = False
    max_loras: Annotated[Positive, about("Maximum adapters in one step.")] = 1
    max_lora_rank: Annotated[
        Annotated[int, Meta(ge=1, le=512)],
        about("Maximum rank of an adapter. Memory for adapters grows with it."),
    ] = 16
    max_cpu_loras: Annotated[
        Positive | None,
        about("Number of recently used adapters that stay in main memory. Default: --max-loras."),
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about("Type of the adapter weights. auto: the type of the activations."),
    ] = "auto"
    lora_modules: Annotated[
        list[str],
        about("Adapters to load at the start: NAME=FOLDER, or JSON with `name` and `path`."),
    ] = []
    lora_dir: Annotated[
        str | None,
        about(
            "Folder with a subfolder per adapter. At run time, servd loads adapters only from "
            "here, when a request or `/v1/load_lora_adapter` names one. Default: no loading at run "
            "time."
        ),
    ] = None

    @property
    def num_adapter_slots(self) -> int:
        """The number of adapters that the workers hold at once."""
        return self.max_loras if self.enable_lora else 0
