"""DeepSeek V2 (https://arxiv.org/abs/2405.04434): latent attention, experts and a shared one."""

import math
from functools import cached_property
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers import experts
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from servd.worker.layers.norm import RMSNorm
from servd.worker.layers.quantized import LAYER, AnyTensor, NamedTensors, Quantized
from servd.worker.layers.rotary import Rotary, Rotation, rope_parameters
from servd.worker.models.llama import LlamaForCausalLM, LlamaMLP
from servd.worker.ops import target
from servd.worker.ops.reference import RoutingRule

NORM_EPS = 1e-6  # eps of the latents' norms, whatever config.json states


class OfHeads(nn.Module):
    """A matrix [out, in] for each of this rank's heads. On CUDA, one product of torch multiplies
    all of them, which are never quantized there.
    """

    def __init__(self, num_heads: int, in_features: int, out_features: int) -> None:
        super().__init__()
        shape = out_features, in_features
        self.is_one_product = target.runs_triton(torch.get_default_device())
        kind = experts.UnquantizedMatrix if self.is_one_product else Matrix
        self.weights = nn.ParameterList(kind(shape, Parallel()) for _ in range(num_heads))
        self.stack = experts.share_memory([*self.weights])

    @cached_property
    def grouped(self) -> experts.GroupedQuantMethod:
        return experts.grouped_quant_method([*self.weights])

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, heads, in] -> [num_tokens, heads, out]
        num_tokens, num_heads, _ = x.shape
        if self.is_one_product:
            matrices = self.stack.tensors["weight"]
            out = x.new_empty(num_tokens, num_heads, matrices.shape[1])
            torch.bmm(x.transpose(0, 1), matrices.mT, out=out.transpose(0, 1))
            return out
        rows = x.transpose(0, 1).flatten(0, 1)
        starts = torch.arange(num_heads + 1, dtype=torch.int32, device=x.device) * num_tokens
        y = self.grouped.multiply(rows, None, starts)
        return y.unflatten(0, (num_heads, num_tokens)).transpose(0, 1)


class DeepseekV2Attention(nn.Module):
    """Multi-head latent attention with absorbed matrices: the cache has one key [rotated | latent]
    per token. Each head's keys and values are linear in the latent. The key matrix is applied to
    the queries instead, and the value matrix to the output of attention.
    """

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__()
        config = spec.config
        hidden_size = spec.hidden_size
        bias = config.get("attention_bias", False)
        num_heads = parallel.share(spec.num_heads)
        self.sizes = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        self.latent_sizes = config["qk_rope_head_dim"], config["kv_lora_rank"]
        (rope, plain_size) = self.sizes
        (_, latent) = self.latent_sizes
        if rope % 2:
            raise UnsupportedModel(f"qk_rope_head_dim {rope} is odd: positions turn pairs")
        if (stated := config.get("head_dim")) not in (None, rope):
            raise UnsupportedModel(f"head_dim {stated} is not the qk_rope_head_dim {rope}")
        value = config["v_head_dim"]
        self.num_heads = num_heads
        self.parallel = parallel
        self.has_neighbours = config.get("rope_interleave", True)
        q_rank = config.get("q_lora_rank")
        q_size = [spec.num_heads * (rope + plain_size)]
        self.has_short_queries = q_rank is not None
        if q_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, q_size, parallel, bias=False)
        else:
            self.q_a_proj = ReplicatedLinear(hidden_size, q_rank, parallel, bias=bias)
            self.q_a_layernorm = RMSNorm(q_rank, NORM_EPS, parallel)
            self.q_b_proj = ColumnParallelLinear(q_rank, q_size, parallel, bias=False)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, rope + latent, parallel, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent, NORM_EPS, parallel)
        self.keys = OfHeads(num_heads, plain_size, latent)
        self.values = OfHeads(num_heads, latent, value)
        self.o_proj = RowParallelLinear(spec.num_heads * value, hidden_size, parallel, bias=bias)
        self.orders = self.row_orders(spec.num_heads)
        for name, order in self.orders.items():
            linear: ColumnParallelLinear | ReplicatedLinear = getattr(self, name)
            linear.weight.row_order = order
        scale = scale_of(spec, rope + plain_size)
        self.attention = Attention(layer, num_heads, 1, rope + latent, scale, value_dim=latent)

    def forward(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        if self.has_short_queries:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            q = self.q_proj(x)
        turned, plain = q.unflatten(-1, (self.num_heads, -1)).split(self.sizes, dim=-1)
        k, latent = self.kv_a_proj_with_mqa(x).split(self.latent_sizes, dim=-1)
        k = torch.cat((k, self.kv_a_layernorm(latent)), dim=-1)
        q = torch.cat((turned, self.keys(plain)), dim=-1)
        out = self.attention(q, k, None, ctx, rotation)
        out = self.values(out.unflatten(-1, (self.num_heads, -1)))
        return self.o_proj(out.flatten(1))

    def row_orders(self, num_heads: int) -> dict[str, Tensor]:
        """Return the order of the checkpoint's rows, by layer: rotated elements come first. If
        their pairs are interleaved in the checkpoint, they are split into first and second halves.
        """
        (rope, plain_size) = self.sizes
        (_, latent) = self.latent_sizes
        with torch.device("cpu"):
            pairs = torch.arange(rope)
            if self.has_neighbours:
                pairs = pairs.view(-1, 2).T.flatten()
            query = torch.cat((plain_size + pairs, torch.arange(plain_size)))
            firsts = torch.arange(num_heads)[:, None] * (rope + plain_size)
            key = torch.cat((latent + pairs, torch.arange(latent)))
        queries = "q_b_proj" if self.has_short_queries else "q_proj"
        return {queries: (firsts + query).flatten(), "kv_a_proj_with_mqa": key}

    def convert(self, name: str, tensor: AnyTensor) -> NamedTensors:
        layer = name.partition(".")[0]
        plain_size = self.sizes[1]
        if layer == "kv_b_proj":
            whole = tensor.dequantize() if isinstance(tensor, Quantized) else tensor
            num_heads = self.num_heads * self.parallel.size
            if len(whole) % num_heads:
                raise UnsupportedModel(f"{name} has {len(whole)} rows for {num_heads} heads")
            heads = whole.unflatten(0, (num_heads, -1))
            for number, head in enumerate(heads.split(self.num_heads)[self.parallel.rank]):
                yield f"keys.weights.{number}", head[:plain_size].T
                yield f"values.weights.{number}", head[plain_size:]
        elif (order := self.orders.get(layer)) is None or len(order) != tensor.shape[0]:
            yield name, tensor  # loading refuses other shapes
        else:
            yield name, take(tensor, order)


def take(rows: AnyTensor, order: Tensor) -> AnyTensor:
    """Return rows[order]."""
    return rows.map(lambda x: x[order]) if isinstance(rows, Quantized) else rows[order]


def scale_of(spec: ModelSpec, size: int) -> float:
    """Return the scale of scores for queries of `size`, which is larger with YaRN."""
    rope = rope_parameters(spec)
    scale = size**-0.5
    if rope.get("mscale_all_dim") and (factor := rope.get("factor", 1.0)) > 1:
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0) ** 2
    return scale


class DeepseekMoE(experts.SparseMoE):
    """Experts chosen within the best groups of experts, or among all unless `is_grouped`; and
    shared experts for all tokens.
    """

    def __init__(
        self, spec: ModelSpec, parallel: Parallel, is_grouped: bool, renormalize: bool
    ) -> None:
        config = spec.config
        size = spec.config["moe_intermediate_size"]
        num_experts = config["n_routed_experts"]
        top_k = config["num_experts_per_tok"]
        act = config.get("hidden_act", "silu")
        super().__init__(spec.hidden_size, size, num_experts, top_k, renormalize, act, parallel)
        self.num_experts: int = num_experts
        self.num_groups: int = config.get("n_group") or 1
        top_groups: int = config.get("topk_group") or 1
        if num_experts % self.num_groups or not 0 < top_groups <= self.num_groups:
            raise UnsupportedModel(
                f"{num_experts} experts in n_group {self.num_groups}, topk_group {top_groups}"
            )
        eligible = num_experts // self.num_groups * top_groups
        if is_grouped and top_k > eligible:
            raise UnsupportedModel(f"{top_k} experts of a token, and {eligible} in its groups")
        factor = config.get("routed_scaling_factor", 1.0)
        groups = (self.num_groups, top_groups) if is_grouped else (1, 1)
        self.rule = RoutingRule(top_k, renormalize, *groups, factor)
        shared = config | {"intermediate_size": size * config["n_shared_experts"]}
        self.shared_experts = LlamaMLP(replace(spec, config=shared), parallel)

    def shared(self, x: Tensor) -> Tensor:
        return self.shared_experts(x)


class DeepseekRotary(Rotary):
    """Rotates a separate part of each head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(replace(spec, head_dim=spec.config["qk_rope_head_dim"]))


def is_dense(spec: ModelSpec, layer: int) -> bool:
    """Return whether a layer is one of the first layers, which have no experts."""
    return layer < spec.config.get("first_k_dense_replace", 0)


def convert_latent(model: LlamaForCausalLM, tensors: NamedTensors) -> NamedTensors:
    layers: dict[str, Any] = dict(model.get_submodule("model.layers").named_children())
    for name, tensor in tensors:
        number = LAYER.search(name)
        prefix, _, leaf = name.rpartition(".self_attn.")
        if number is None:
            yield name, tensor
        elif number[1] in layers and prefix:
            for part_name, part in layers[number[1]].self_attn.convert(leaf, tensor):
                yield f"{prefix}.self_attn.{part_name}", part
        elif number[1] in layers:
            yield name, tensor


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    attention_class = DeepseekV2Attention
    rotary_class = DeepseekRotary
    convert = convert_latent

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if is_dense(spec, layer):
            return LlamaMLP(spec, parallel)
        is_grouped = spec.config.get("topk_method") == "group_limited_greedy"
        return DeepseekMoE(spec, parallel, is_grouped, renormalize=False)
