"""The text models of Qwen 3.5: Qwen 3-Next with a feed-forward in every layer, and with separate
projections in the delta nets.
"""

from torch import Tensor

from servd.worker.device.parallel import Parallel
from servd.worker.layers.hybrid import HybridLayer
from servd.worker.layers.linear import ColumnParallelLinear
from servd.worker.layers.norm import OffsetRMSNorm
from servd.worker.models import qwen3_next
from servd.worker.models.llama import LlamaForCausalLM

PACKED = LlamaForCausalLM.packed | {"in_proj_b": ("in_proj_ba", 0), "in_proj_a": ("in_proj_ba", 1)}


class Qwen3_5DeltaNet(qwen3_next.GatedDeltaNet):
    def make_projections(
        self, hidden: int, keys: int, values: int, num_values: int, parallel: Parallel
    ) -> None:
        sizes = [keys, keys, values], [values], [num_values, num_values]
        self.in_proj_qkv, self.in_proj_z, self.in_proj_ba = (
            ColumnParallelLinear(hidden, size, parallel, bias=False) for size in sizes
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, a = self.in_proj_ba(x).chunk(2, dim=-1)
        return self.in_proj_qkv(x), self.in_proj_z(x), b, a


class Qwen3_5ForCausalLM(LlamaForCausalLM):
    layer_class = HybridLayer
    attention_class = qwen3_next.Qwen3NextAttention
    state_class = Qwen3_5DeltaNet
    norm_class = OffsetRMSNorm
    rotary_class = qwen3_next.Qwen3NextRotary
    convert = staticmethod(qwen3_next.convert_text)
    packed = PACKED
