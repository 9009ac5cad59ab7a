"""Qwen 3 (https://arxiv.org/abs/2505.09388): Llama with RMSNorm on the heads of q and k."""

from __future__ import annotations

from typing import ClassVar

from servd.checkpoint.hf import ModelSpec
from servd.worker.attention import Norms
from servd.worker.device.parallel import Parallel
from servd.worker.layers.norm import RMSNorm
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer
from servd.worker.models.qwen2 import refuse_mixed_windows


class Qwen3Attention(LlamaAttention):
    """Norms each head of q and k before the rotation."""

    norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__(spec, layer, parallel)
        eps = spec.config.get("rms_norm_eps", 1e-6)
        self.q_norm = self.norm(spec.head_dim, eps, parallel)
        self.k_norm = self.norm(spec.head_dim, eps, parallel)

    @property
    def norms(self) -> Norms:
        return self.q_norm, self.k_norm


class Qwen3Layer(LlamaLayer):
    attention = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer = Qwen3Layer

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        refuse_mixed_windows(spec)
        super().__init__(spec, parallel)
