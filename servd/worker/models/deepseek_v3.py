"""DeepSeek V3 and R1 (https://arxiv.org/abs/2412.19437): V2 with independent weights of experts,
chosen with a bias that balances their load.
"""

from torch import nn

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.weight import FloatWeight
from servd.worker.models import deepseek_v2
from servd.worker.models.llama import LlamaForCausalLM, LlamaMLP


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    attention_class = deepseek_v2.DeepseekV2Attention
    rotary_class = deepseek_v2.DeepseekRotary
    convert = deepseek_v2.convert_latent

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if deepseek_v2.is_dense(spec, layer):
            return LlamaMLP(spec, parallel)
        renormalize = spec.config.get("norm_topk_prob", True)
        moe = deepseek_v2.DeepseekMoE(spec, parallel, is_grouped=True, renormalize=renormalize)
        if moe.num_experts < 2 * moe.num_groups:
            raise UnsupportedModel(f"{moe.num_experts} experts in {moe.num_groups} groups")
        bias = FloatWeight((moe.num_experts,), parallel)
        moe.gate.register_parameter("e_score_correction_bias", bias)
        moe.rule = moe.rule._replace(bias=bias)
        return moe
