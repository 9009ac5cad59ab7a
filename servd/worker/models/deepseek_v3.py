"""DeepSeek V3 and R1 (https://arxiv.org/abs/2412.19437): V2 with experts that are weighed each for
itself, and chosen with a bias that keeps them equally busy.
"""

from __future__ import annotations

from torch import Tensor

from servd.checkpoint.hf import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.weight import Weight
from servd.worker.models.deepseek_v2 import (
    DeepseekV2ForCausalLM,
    DeepseekV2Layer,
    DeepseekV2MoE,
)


class DeepseekV3MoE(DeepseekV2MoE):
    """Groups count by their two best experts."""

    is_biased = True

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        bias = Weight((self.num_experts,), parallel)
        bias.data = bias.data.float()  # 16 bits would choose other experts
        self.gate.register_parameter("e_score_correction_bias", bias)

    def score(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = logits.sigmoid()
        scores = weights + self.gate.get_parameter("e_score_correction_bias")
        groups = scores.unflatten(1, (self.num_groups, -1))
        return weights, scores, groups.topk(2).values.sum(dim=2)


class DeepseekV3Layer(DeepseekV2Layer):
    experts = DeepseekV3MoE


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    layer = DeepseekV3Layer
