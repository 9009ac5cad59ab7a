"""The text models of Qwen 3.5 with experts."""

from msgspec.structs import replace

from servd.checkpoint.hf import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.quantized import NamedTensors
from servd.worker.models.qwen3_5_text import Qwen3_5ForCausalLM
from servd.worker.models.qwen3_moe import one_by_one
from servd.worker.models.qwen3_next import SharedMoE, convert_text


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen 3.5 with experts in every layer; a token's experts have weights that add up to 1."""

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> SharedMoE:
        config = spec.config | {"norm_topk_prob": True}
        return SharedMoE(replace(spec, config=config), parallel)

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        return one_by_one(convert_text(tensors))
