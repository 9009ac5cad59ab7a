"""FlashAttention of torch (`varlen_attn`), which reads the paged KV cache in place; CUDA only."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from servd.worker.attention import AttentionBatch, AttentionSpec
from servd.worker.attention import Backend as AttentionBackend

# `varlen_attn` supports a paged cache only with FlashAttention 3, whose kernels torch finds in this
# module of flash-attn-3.
FA3_MODULE = "flash_attn_interface"
NEEDED_PARAMETERS = {"block_table", "seqused_k", "window_size", "enable_gqa", "num_splits"}


@dataclass(frozen=True)
class Metadata:
    batch: AttentionBatch
    max_query_len: int
    max_seq_len: int

    @property
    def slot_mapping(self) -> Tensor:
        return self.batch.slot_mapping


class Backend(AttentionBackend[Metadata]):
    """Runs one kernel per layer for the whole mixed batch."""

    auto_order = {"cuda": 10}  # FlashAttention 3, hand-tuned for Hopper
    supports_graphs = True
    supports_batch_invariance = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        attention = importlib.import_module("torch.nn.attention")
        attention.activate_flash_attention_impl("FA3")
        self.kernel = _varlen_attn()
        # (left, right): keys attended to on each side of the token; -1 is no limit.
        self.window = (-1 if spec.sliding_window is None else spec.sliding_window - 1, 0)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot run. It needs a Hopper GPU, a 16-bit type, the flash-attn-3
        package and a torch with the paged signature.
        """
        if spec.device.type != "cuda":
            return f"needs CUDA, not {spec.device.type}"
        if torch.cuda.get_device_capability(spec.device) != (9, 0):
            return "needs compute capability 9.0 (Hopper)"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, not {spec.dtype}"
        if spec.kv_dtype != spec.dtype:
            return f"needs a cache of {spec.dtype}, not {spec.kv_dtype}"
        if spec.head_dim % 8 or spec.head_dim > 256:
            return f"needs a head_dim that is a multiple of 8 up to 256, not {spec.head_dim}"
        try:
            missing = NEEDED_PARAMETERS - inspect.signature(_varlen_attn()).parameters.keys()
        except ImportError:
            return "this torch has no varlen_attn"
        if missing:
            return f"this torch's varlen_attn has no {', '.join(sorted(missing))}"
        return None if importlib.util.find_spec(FA3_MODULE) else "needs the package flash-attn-3"

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        return Metadata(batch, int(batch.query_lens.max()), int(batch.seq_lens.max()))

    def attend(
        self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float, sinks: Tensor | None
    ) -> Tensor:
        batch = metadata.batch
        out = self.kernel(
            q,
            kv_cache[0],
            kv_cache[1],
            batch.query_start_loc,
            None,  # the block table replaces cu_seq_k
            metadata.max_query_len,
            metadata.max_seq_len,
            scale=scale,
            window_size=self.window,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
            seqused_k=batch.seq_lens_device,
            block_table=batch.block_tables,
            # With several splits a row's result would depend on the longest row of the batch.
            num_splits=1 if self.spec.batch_invariant else None,
        )
        return out.contiguous()


def _varlen_attn() -> Callable[..., Tensor]:
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn
