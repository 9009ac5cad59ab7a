"""GPT-OSS (https://arxiv.org/abs/2508.10925): experts with biases and a clamped gate, attention
sinks, a sliding window in every other layer.
"""

from typing import Any

import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.overrides import rope_of
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Activation
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.quantized import AnyTensor, NamedTensors, Quantized
from servd.worker.layers.weight import Weight
from servd.worker.models.gemma2 import is_sliding
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM
from servd.worker.models.mixtral import expert_options


class GptOssAttention(LlamaAttention):
    """Attention with sinks: a learned score per head, whose key has no value."""

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__(spec, layer, parallel)
        self.sinks = Weight((spec.num_heads,), parallel, shard_dim=0)

    @staticmethod
    def biases(config: dict[str, Any]) -> tuple[bool, bool]:
        bias = config.get("attention_bias", True)
        return bias, bias

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        window = config.get("sliding_window", 128) if is_sliding(config, layer, 2) else None
        return {"sliding_window": window, "has_sinks": True}


class ClampedGate(Activation):
    """SwiGLU of one half of the inputs, times the other half plus one; both halves are clamped."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__("silu")
        self.alpha = alpha
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.clamped_gate(x, self.alpha, self.limit)


class GptOssForCausalLM(LlamaForCausalLM):
    attention_class = GptOssAttention

    @staticmethod
    def check_spec(spec: ModelSpec) -> None:
        """Raise UnsupportedModel without a rotation: transformers then takes that of gpt-oss."""
        if not rope_of(spec.config):
            raise UnsupportedModel("config.json of gpt_oss lacks rope_parameters or rope_scaling")

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> SparseMoE:
        alpha = spec.config.get("swiglu_alpha", 1.702)
        limit = spec.config.get("swiglu_limit", 7.0)
        options: dict[str, Any] = expert_options(spec) | {"activation": ClampedGate(alpha, limit)}
        return SparseMoE(**options, parallel=parallel, bias=True)

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        """Yield the tensors with the experts split. In the checkpoint, rows of gate and up are
        interleaved, and matrices are [in, out] unless quantized. GGUF has them split.
        """
        for name, tensor in tensors:
            prefix, is_of_experts, path = name.partition(".mlp.experts.")
            if not is_of_experts or path.endswith((".weight", ".bias")):
                name = name.replace(".mlp.router.", ".mlp.gate.")
                yield name.replace(".sinks.weight", ".sinks"), tensor
                continue
            expert, is_quantized, what = path.rpartition(".")  # NUMBER.NAME if quantized
            module, is_bias, _ = what.partition("_bias")
            leaf = "bias" if is_bias else "weight"
            parts = [tensor] if isinstance(tensor, Quantized) else tensor.unbind()
            for number, part in enumerate(parts, start=int(expert) if is_quantized else 0):
                part = part.t() if isinstance(part, Tensor) and not is_bias else part
                if module == "gate_up_proj":
                    part = _halves(part)
                yield f"{prefix}.mlp.experts.{number}.{module}.{leaf}", part


def _halves(rows: AnyTensor) -> AnyTensor:
    """Return rows 0, 2, 4 ... and then rows 1, 3, 5 ..."""

    def order(x: Tensor) -> Tensor:
        return torch.cat((x[0::2], x[1::2]))

    return rows.map(order) if isinstance(rows, Quantized) else order(rows)
