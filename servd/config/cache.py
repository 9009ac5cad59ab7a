"""The options of the KV cache, and of its connector."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.base.errors import ConfigError
from servd.config._section import Positive, Section, Share, about
from servd.config.kv_events import KVEventsConfig
from servd.config.kv_transfer import KVTransferConfig

Gibibytes = Annotated[float, Meta(gt=0, le=1 << 20)]


class CacheConfig(Section, frozen=True):
    """KV cache."""

    block_size: Annotated[int, about("Tokens per KV-cache block.", ge=1, le=256)] = 16
    gpu_memory_utilization: Annotated[
        Share, about("Share of the device's memory that servd may use in all.")
    ] = 0.9
    kv_cache_memory: Annotated[
        Positive | None,
        about('Memory for the KV cache: bytes or "2GiB". Default: from what is free.'),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "int8", "fp8"],
        about(
            "Type of keys and values. auto: --dtype; bfloat16 where a CPU may round activations to "
            "8 bits. On CPUs: float16, bfloat16; int8, with a scale for each token and head. fp8: "
            "e4m3, for GPUs, half the bytes of 16 bits."
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, about("Reuse the KV cache of equal prompt beginnings.")
    ] = True
    max_pinned_share: Annotated[
        float,
        about(
            "Share of the KV cache's blocks that may be pinned: prompts of requests with "
            "`retention`, and of --pin-prefix.",
            ge=0,
            le=0.9,
        ),
    ] = 0.25
    pin_prefix: Annotated[
        list[str],
        about(
            "Files with prompts that stay in the KV cache: the body of a chat request, if the "
            "name ends with .json, else text."
        ),
    ] = []
    kv_cache_dir: Annotated[
        str | None,
        about(
            "Folder that keeps the KV cache of prompts and answers over restarts, also of several "
            "engines at once. Its files tell of prompts: keep it private."
        ),
    ] = None
    kv_cache_dir_size: Annotated[
        Gibibytes, about("GiB of files in --kv-cache-dir; those not used for longest are deleted.")
    ] = 10.0
    kv_offloading_size: Annotated[
        Gibibytes | None,
        about(
            "GiB of host memory, over all devices, for blocks that the KV cache has no room for, "
            "of prompts and of preempted requests; they come back where that is faster "
            "than to compute them. Default: none."
        ),
    ] = None
    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        about(
            "Give KV blocks to other engines, or have them from there, as JSON with vLLM's keys: "
            '`{"kv_role": "kv_producer"}`; see docs/how-to/disaggregated.md.'
        ),
    ] = None
    kv_events_config: Annotated[
        KVEventsConfig | None,
        about(
            "Tell routers over ZMQ which blocks the prefix cache has, as JSON with vLLM's keys: "
            '`{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}`. Whoever can connect '
            "reads the tokens of prompts."
        ),
    ] = None
    kv_cache_metrics: Annotated[
        bool, about("Measure how long blocks live, lie idle and wait to be used again.")
    ] = False
    kv_cache_metrics_sample: Annotated[
        Share, about("Share of the blocks that --kv-cache-metrics measures.")
    ] = 0.01

    @property
    def has_connector(self) -> bool:
        """Whether a KV connector saves blocks beyond the device, or loads them from there."""
        options = self.kv_offloading_size, self.kv_cache_dir, self.kv_transfer_config
        return any(each is not None for each in options)

    def validate(self) -> None:
        """Check what is resolved.

        Raises:
            ConfigError: a KV connector or events without a prefix cache.
        """
        if (
            self.kv_events_config is not None
            and self.kv_events_config.is_on
            and not self.enable_prefix_caching
        ):
            raise ConfigError(
                "--kv-events-config reports what the prefix cache has, and that is off, as with "
                "every encoder and with linear attention: leave it out"
            )
        if self.has_connector and not self.enable_prefix_caching:
            raise ConfigError(
                "--kv-cache-dir, --kv-offloading-size and --kv-transfer-config keep or give what "
                "the prefix cache has, and that is off, as with every encoder and with linear "
                "attention: leave them out"
            )
