"""The options of the KV cache, and of its connector."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.base.errors import ConfigError
from servd.config._section import Positive, Section, Share
from servd.config.kv_events import KVEventsConfig
from servd.config.kv_transfer import KVTransferConfig

Gibibytes = Annotated[float, Meta(gt=0, le=1 << 20)]


class CacheConfig(Section, frozen=True):
    """KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    """Tokens per KV-cache block."""
    gpu_memory_utilization: Share = 0.9
    """Share of the device's memory that servd may use in total."""
    kv_cache_memory: Positive | None = None
    """Memory for the KV cache, in bytes or as "2GiB". Default: derived from the free memory."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    """Type of keys and values. auto: --dtype, or bfloat16 if a CPU rounds activations to 8 bits.
    int8 needs a CPU, fp8 (e4m3) a GPU.
    """
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of earlier prompts with the same beginning."""
    max_state_memory: Positive | None = None
    """Memory for checkpoints of a model with recurrent states, in bytes or as "2GiB". A prompt goes
    on from a checkpoint instead of its beginning. Default: half of the KV cache's memory.
    """
    state_checkpoint_interval: Positive | None = None
    """Tokens of a prompt from a checkpoint of its states to the next. Default: as many as take the
    bytes of a checkpoint in the KV cache; 1024 for models without attention. The last blocks of
    prompt, output and earlier turns always have one.
    """
    max_pinned_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.25
    """Maximum share of the KV cache that requests (`retention`) and --pin-prefix may keep."""
    pin_prefix: list[str] = []
    """Files with prompts to keep in the KV cache. A .json file holds a chat request, any other file
    plain text.
    """
    kv_cache_dir: str | None = None
    """Folder that keeps KV blocks across restarts; several engines may share it. Its files reveal
    prompts: keep it private.
    """
    kv_cache_dir_size: Gibibytes = 10.0
    """Maximum GiB in --kv-cache-dir. Beyond it, servd deletes the least recently used files."""
    kv_offloading_size: Gibibytes | None = None
    """GiB of host memory, over all devices, for KV blocks of preempted requests and evicted blocks.
    Default: none.
    """
    kv_transfer_config: KVTransferConfig | None = None
    """Exchange KV blocks with other engines, as JSON with vLLM's keys: `{"kv_role":
    "kv_producer"}`. See docs/how-to/disaggregated.md.
    """
    kv_events_config: KVEventsConfig | None = None
    """Publish over ZMQ which blocks the prefix cache holds, as JSON: `{"enable_kv_cache_events":
    true, "endpoint": "tcp://*:5557"}`. Whoever can connect can read prompts.
    """
    kv_cache_metrics: bool = False
    """Measure lifetime, idle time and reuse of KV blocks."""
    kv_cache_metrics_sample: Share = 0.01
    """Share of the blocks that --kv-cache-metrics measures."""

    @property
    def has_connector(self) -> bool:
        """Whether a KV connector saves blocks outside the device, or loads them from there."""
        options = self.kv_offloading_size, self.kv_cache_dir, self.kv_transfer_config
        return any(option is not None for option in options)

    def validate(self) -> None:
        """Check resolved options. Raises ConfigError if a KV connector or events are configured
        without a prefix cache.
        """
        if (
            self.kv_events_config is not None
            and self.kv_events_config.is_on
            and not self.enable_prefix_caching
        ):
            raise ConfigError(
                "--kv-events-config needs the prefix cache, which is off (always for encoders, and "
                "on CUDA for models with states): remove the option"
            )
        if self.has_connector and not self.enable_prefix_caching:
            raise ConfigError(
                "--kv-cache-dir, --kv-offloading-size and --kv-transfer-config need the prefix "
                "cache, which is off (always for encoders, and on CUDA for models with states): "
                "remove the options"
            )
