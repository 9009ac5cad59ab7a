"""The options of LoRA adapters."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import Positive, Section, about


class LoRAConfig(Section, frozen=True):
    """LoRA adapters."""

    enable_lora: Annotated[bool, about("Serve LoRA adapters; requests name one as `model`.")] = (
        False
    )
    max_loras: Annotated[Positive, about("Most adapters in one step.")] = 1
    max_lora_rank: Annotated[
        Annotated[int, Meta(ge=1, le=512)],
        about("Largest rank of an adapter; it decides how much memory they take."),
    ] = 16
    max_cpu_loras: Annotated[
        Positive | None,
        about("Adapters kept in main memory, those used last. Default: --max-loras."),
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about("Type that adapters are kept in; auto: that of the activations."),
    ] = "auto"
    lora_modules: Annotated[
        list[str],
        about("Adapters to serve from the start: NAME=FOLDER, or JSON with `name` and `path`."),
    ] = []
    lora_dir: Annotated[
        str | None,
        about(
            "Folder of adapters, one folder each, that are loaded when a request names them. "
            "`/v1/load_lora_adapter` reads from here and from nowhere else. Default: no adapter "
            "can be loaded at run time."
        ),
    ] = None

    @property
    def num_adapter_slots(self) -> int:
        """Adapters that the workers hold at once."""
        return self.max_loras if self.enable_lora else 0
