"""Qwen 3 (https://arxiv.org/abs/2505.09388): Llama with RMSNorm on the heads of q and k."""

from servd.worker.layers.norm import RMSNorm
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM
from servd.worker.models.qwen2 import refuse_mixed_windows


class Qwen3Attention(LlamaAttention):
    head_norm_class = RMSNorm


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention_class = Qwen3Attention
    check_spec = staticmethod(refuse_mixed_windows)
