"""The text models of Qwen 3.5 with experts."""

from msgspec.structs import replace

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.hybrid import HybridLayer
from servd.worker.layers.norm import OffsetRMSNorm
from servd.worker.layers.quantized import NamedTensors
from servd.worker.models import qwen3_next
from servd.worker.models.llama import LlamaForCausalLM
from servd.worker.models.qwen3_5_text import PACKED, Qwen3_5DeltaNet
from servd.worker.models.qwen3_moe import one_by_one


class Qwen3_5MoeForCausalLM(LlamaForCausalLM):
    """Qwen 3.5 with experts in every layer; a token's experts have weights that add up to 1."""

    layer_class = HybridLayer
    attention_class = qwen3_next.Qwen3NextAttention
    state_class = Qwen3_5DeltaNet
    norm_class = OffsetRMSNorm
    rotary_class = qwen3_next.Qwen3NextRotary
    packed = PACKED

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> qwen3_next.SharedMoE:
        return qwen3_next.SharedMoE(
            replace(spec, config=spec.config | {"norm_topk_prob": True}), parallel
        )

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        return one_by_one(qwen3_next.convert_text(tensors))
