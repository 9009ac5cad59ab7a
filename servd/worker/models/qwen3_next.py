"""Qwen 3-Next: most layers are gated delta nets (https://arxiv.org/abs/2412.06464), with a
recurrent state instead of a KV cache. The other layers have attention with an output gate.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import ModelSpec
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.experts import Router, SparseMoE
from servd.worker.layers.hybrid import HybridLayer
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.norm import GatedRMSNorm, L2Norm, OffsetRMSNorm
from servd.worker.layers.quantized import NamedTensors
from servd.worker.layers.rotary import Rotary, Rotation, rope_parameters
from servd.worker.layers.state import Convolution, State
from servd.worker.layers.weight import FloatWeight
from servd.worker.models.deepseek_v2 import take
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from servd.worker.models.qwen3_moe import expert_options, has_experts
from servd.worker.ops._state_rows import Decay


class Qwen3NextRotary(Rotary):
    """Rotary positions that rotate a quarter of each head by default."""

    is_partial = True

    @staticmethod
    def rope_parameters(spec: ModelSpec) -> dict[str, Any]:
        share = spec.config.get("partial_rotary_factor", 0.25)
        return {"partial_rotary_factor": share} | rope_parameters(spec)


class Qwen3NextAttention(LlamaAttention):
    """Attention with an output gate for each head in q_proj, and normalized q and k."""

    query_parts = 2
    head_norm_class = OffsetRMSNorm

    def forward(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.local_features, dim=-1)
        q, gate = q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        out = self.attention(q, k, v, ctx, rotation, norms=self.norms)
        out = self.q_norm.ops.multiply_sigmoid(out.view(gate.shape), gate)
        return self.o_proj(out.flatten(1))


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule. Each head's state is a matrix from keys to values.
    Each token decays the state, then corrects its value for the token's key.
    """

    part_name = "linear_attn"

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        config = spec.config
        size = parallel.size
        hidden = spec.hidden_size
        num_keys = config["linear_num_key_heads"]
        num_values = config["linear_num_value_heads"]
        self.key_dim = config["linear_key_head_dim"]
        self.value_dim = config["linear_value_head_dim"]
        if min(num_keys, num_values, self.key_dim, self.value_dim) < 1:
            raise UnsupportedModel("config.json: a size of the linear attention is below 1")
        if num_keys % size or num_values % num_keys:
            raise UnsupportedModel(
                f"linear attention: --tensor-parallel-size {size} must divide its {num_keys} heads "
                f"of keys, and those the {num_values} of values"
            )
        self.num_keys = num_keys // size
        self.num_values = num_values // size
        keys = num_keys * self.key_dim
        values = num_values * self.value_dim
        self.sizes = [keys // size, keys // size, values // size]  # sizes of q, k, v on this rank
        self.make_projections(hidden, keys, values, num_values, parallel)
        conv_size = config.get("linear_conv_kernel_dim", 4)
        act = config.get("hidden_act", "silu")
        self.conv1d = Convolution([keys, keys, values], conv_size, parallel, activation=act)
        self.q_norm = L2Norm(self.key_dim, 1e-6, self.key_dim**-0.5)
        self.k_norm = L2Norm(self.key_dim, 1e-6)
        self.dt_bias = FloatWeight((num_values,), parallel, shard_dim=0)
        self.A_log = FloatWeight((num_values,), parallel, shard_dim=0, change=torch.exp)
        self.state = State(self.num_values, self.key_dim, self.value_dim)
        self.norm = GatedRMSNorm(self.value_dim, config.get("rms_norm_eps", 1e-6), parallel)
        self.out_proj = RowParallelLinear(values, hidden, parallel, bias=False)
        self.ops = ops.for_device(torch.get_default_device())

    def make_projections(
        self, hidden: int, keys: int, values: int, num_values: int, parallel: Parallel
    ) -> None:
        sizes = [keys, keys, values, values], [num_values, num_values]
        self.in_proj_qkvz, self.in_proj_ba = (
            ColumnParallelLinear(hidden, size, parallel, bias=False) for size in sizes
        )
        num_keys = keys // self.key_dim
        for linear, parts in zip((self.in_proj_qkvz, self.in_proj_ba), sizes, strict=True):
            # The checkpoint has all parts of a key head before the next head.
            with torch.device("cpu"):
                rows = torch.arange(sum(parts)).view(num_keys, -1)
            heads = rows.split([part // num_keys for part in parts], dim=1)
            linear.weight.row_order = torch.cat([head.flatten() for head in heads])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, for x [num_tokens, hidden]: q, k and v concatenated; the output gate [num_tokens,
        values]; b and a of the operation `linear_scan`.
        """
        qkv, gate = self.in_proj_qkvz(x).split([sum(self.sizes), self.sizes[2]], dim=-1)
        b, a = self.in_proj_ba(x).chunk(2, dim=-1)
        return qkv, gate, b, a

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        qkv, gate, b, a = self.project(x)
        q, k, v = self.conv1d(qkv, ctx).split(self.sizes, dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.key_dim)))
        k = self.k_norm(k.unflatten(-1, (-1, self.key_dim)))
        v, gate = (x.unflatten(-1, (-1, self.value_dim)) for x in (v, gate))
        decay = Decay(self.dt_bias, self.A_log, None)
        out = self.ops.linear_scan(q, k, v, a, b, decay, self.state.rows(ctx))
        return self.out_proj(self.norm(out, gate).flatten(1).to(x.dtype))


class SharedMoE(SparseMoE):
    """Experts, and a gated shared expert for all tokens."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(**expert_options(spec), parallel=parallel)
        size = spec.config["shared_expert_intermediate_size"]
        self.shared_expert = LlamaMLP(spec, parallel, size)
        self.shared_expert_gate = Router(spec.hidden_size, 1, parallel, bias=False)

    def shared(self, x: Tensor) -> Tensor:
        gate = self.shared_expert_gate(x)
        return self.activation.ops.multiply_sigmoid(self.shared_expert(x), gate)


def convert_text(tensors: NamedTensors) -> NamedTensors:
    """Yield the tensors except the multi-token-prediction layer and the vision encoder."""
    for name, tensor in tensors:
        if not name.startswith(("mtp.", "model.visual.")):
            yield name.replace("model.language_model.", "model."), tensor


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """Qwen 3-Next's language model, whose norms have weights around 0."""

    layer_class = HybridLayer
    attention_class = Qwen3NextAttention
    state_class = GatedDeltaNet
    norm_class = OffsetRMSNorm
    rotary_class = Qwen3NextRotary
    packed: ClassVar[dict[str, tuple[str, int]]] = LlamaForCausalLM.packed | {
        f"in_proj_{part}": ("in_proj_qkvz", number) for number, part in enumerate("qkvz")
    }

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        """Yield the tensors of the text model, with their rows in our order."""
        weights = {
            name.rpartition("layers.")[2]: weight
            for name, weight in self.named_parameters()
            if isinstance(weight, Matrix) and weight.row_order is not None
        }
        for name, tensor in convert_text(tensors):
            place = name.rpartition("layers.")[2]
            weight = weights.get(place.replace("_qkv.", "_qkvz."))
            if weight is None or weight.row_order is None:
                yield name, tensor
            elif name.endswith("_qkv.weight"):  # of a GGUF file, where z is a tensor of its own
                sizes = [shape[0] for shape in weight.part_shapes[:3]]
                for part, piece in zip("qkv", tensor.split(sizes), strict=True):
                    yield name.replace("_qkv.", f"_{part}."), piece
            elif len(weight.row_order) == tensor.shape[0]:
                yield name, take(tensor, weight.row_order)
            else:  # loading refuses it
                yield name, tensor

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if has_experts(spec.config, layer):
            return SharedMoE(spec, parallel)
        return LlamaMLP(spec, parallel)
