"""Qwen 3-Next: most layers are gated delta nets (https://arxiv.org/abs/2412.06464), with a
recurrent state instead of a KV cache. The other layers have attention with an output gate.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.device import upload
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Activation
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.experts import Router, SparseMoE
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.norm import OffsetRMSNorm, RMSNorm
from servd.worker.layers.quantized import NamedTensors
from servd.worker.layers.rotary import Rotary, Rotation, rope_parameters
from servd.worker.layers.state import State
from servd.worker.layers.weight import Weight
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from servd.worker.models.qwen3_moe import expert_options, has_experts

CHUNK = 64  # tokens per chunk of the parallel scan of prompts


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
        out = self.attention(q.flatten(1), k, v, ctx, rotation, norms=self.norms)
        return self.o_proj(out * gate.flatten(1).sigmoid())


class Convolution(nn.Module):
    """A causal depthwise convolution over tokens."""

    def __init__(self, parts: list[int], size: int, activation: str, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((sum(parts), 1, size), parallel, shard_dim=0, parts=parts)
        self.activation = Activation(activation)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """Return a tensor of the shape of x [..., num_tokens, channels], float32. `before`: the
        size - 1 previous inputs, replaced by the last inputs.
        """
        num_tokens = x.shape[-2]
        whole = torch.cat((before, x), dim=-2)
        before.copy_(whole[..., num_tokens:, :])
        weight = self.weight.float().permute(2, 1, 0)  # [size, 1, channels]
        out = whole.narrow(-2, 0, num_tokens) * weight[0]
        for at in range(1, len(weight)):
            out.addcmul_(whole.narrow(-2, at, num_tokens), weight[at])
        return self.activation(out)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule. Each head's state is a matrix from keys to values.
    Each token decays the state, then corrects its value for the token's key.
    """

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        config = spec.config
        size = parallel.size
        hidden = spec.hidden_size
        num_keys = config["linear_num_key_heads"]
        num_values = config["linear_num_value_heads"]
        if num_keys % size or num_values % num_keys:
            raise UnsupportedModel(
                f"linear attention: --tensor-parallel-size {size} must divide its {num_keys} heads "
                f"of keys, and those the {num_values} of values"
            )
        self.key_dim = config["linear_key_head_dim"]
        self.value_dim = config["linear_value_head_dim"]
        self.num_keys = num_keys // size
        self.num_values = num_values // size
        keys = num_keys * self.key_dim
        values = num_values * self.value_dim
        self.sizes = [keys // size, keys // size, values // size]  # sizes of q, k, v on this rank
        self.make_projections(hidden, keys, values, num_values, parallel)
        conv_size = config.get("linear_conv_kernel_dim", 4)
        activation = config.get("hidden_act", "silu")
        self.conv1d = Convolution([keys, keys, values], conv_size, activation, parallel)
        self.dt_bias = Weight((num_values,), parallel, shard_dim=0)
        self.A_log = Weight((num_values,), parallel, shard_dim=0)
        for weight in (self.dt_bias, self.A_log):
            weight.data = weight.data.float()
        self.norm = RMSNorm(self.value_dim, config.get("rms_norm_eps", 1e-6), parallel)
        self.activation = Activation("silu")  # of the gate, whatever config.json has
        self.out_proj = RowParallelLinear(values, hidden, parallel, bias=False)
        # The last inputs of the convolution, and the state matrices.
        matrices = self.num_values, self.key_dim, self.value_dim
        self.state = State((conv_size - 1, sum(self.sizes)), matrices)

    def make_projections(
        self, hidden: int, keys: int, values: int, num_values: int, parallel: Parallel
    ) -> None:
        sizes = [2 * (keys + values)], [2 * num_values]
        self.in_proj_qkvz, self.in_proj_ba = (
            ColumnParallelLinear(hidden, size, parallel, bias=False) for size in sizes
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, for x [num_tokens, hidden]: q, k and v concatenated; the output gate [num_tokens,
        num_values, value_dim]; beta and decay inputs [num_tokens, num_values] each. The checkpoint
        groups these outputs by key head.
        """
        per_key = self.num_values // self.num_keys
        size = per_key * self.value_dim
        q, k, v, gate = (
            part.flatten(1)
            for part in self.in_proj_qkvz(x)
            .unflatten(-1, (self.num_keys, -1))
            .split([self.key_dim, self.key_dim, size, size], dim=-1)
        )
        b, a = self.in_proj_ba(x).unflatten(-1, (self.num_keys, 2, per_key)).unbind(-2)
        gate = gate.unflatten(-1, (-1, self.value_dim))
        return torch.cat((q, k, v), dim=-1), gate, b.flatten(1), a.flatten(1)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        qkv, gate, b, a = self.project(x)
        # Logarithm of the decay.
        decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        inputs = qkv.float(), decay, b.float().sigmoid()
        out = self.norm(self._of_rows(ctx, *inputs).to(x.dtype))
        out = out * self.activation(gate.float().contiguous())
        return self.out_proj(out.flatten(1).to(x.dtype))

    def _of_rows(self, ctx: ForwardContext, *inputs: Tensor) -> Tensor:
        """Return the outputs of a step's tokens, [num_tokens, num_values, value_dim], float32. Rows
        of one token run together, longer rows one by one.
        """
        lens = ctx.batch.query_lens
        device = inputs[0].device
        before, matrices = self.state.read(ctx)
        if (lens == 1).all():
            return self._step(inputs, before, matrices)
        out = inputs[0].new_empty(len(inputs[0]), self.num_values, self.value_dim)
        ends = np.cumsum(lens)
        if len(single := np.flatnonzero(lens == 1)):
            rows = upload(single, device)
            tokens = upload(ends[single] - 1, device)
            kept = before[rows], matrices[rows]
            out[tokens] = self._step([x[tokens] for x in inputs], *kept)
            before[rows], matrices[rows] = kept
        for row in np.flatnonzero(lens > 1):
            part = slice(ends[row] - lens[row], ends[row])
            out[part] = self._scan([x[part] for x in inputs], before[row], matrices[row])
        return out

    def _heads(self, qkv: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [..., num_tokens, num_values, size] of qkv [..., num_tokens, channels]."""
        q, k, v = self.conv1d(qkv, before).split(self.sizes, dim=-1)
        q, k = (x.unflatten(-1, (self.num_keys, self.key_dim)) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        per_key = self.num_values // self.num_keys
        q, k = (x.repeat_interleave(per_key, dim=-2) for x in (q, k))
        return q * self.key_dim**-0.5, k, v.unflatten(-1, (self.num_values, self.value_dim))

    def _step(self, inputs: Sequence[Tensor], before: Tensor, matrices: Tensor) -> Tensor:
        """Return the outputs of one token of each row, rows first. Update the state in place."""
        qkv, decay, rate = inputs
        q, k, v = (x.squeeze(1) for x in self._heads(qkv.unsqueeze(1), before))
        matrices.mul_(decay.exp()[..., None, None])
        values = (k.unsqueeze(-2) @ matrices).squeeze(-2)
        change = (v - values) * rate.unsqueeze(-1)
        flat = matrices.view(-1, self.key_dim, self.value_dim)
        flat.baddbmm_(k.reshape(-1, self.key_dim, 1), change.view(-1, 1, self.value_dim))
        return (q.unsqueeze(-2) @ matrices).squeeze(-2)

    def _scan(self, inputs: Sequence[Tensor], before: Tensor, matrix: Tensor) -> Tensor:
        """Return the outputs of one row, chunk by chunk (https://arxiv.org/abs/2406.06484):
        corrections within a chunk solve a triangular system. Updates the state in place.
        """
        qkv, decay, rate = inputs
        num_tokens = len(qkv)
        size = min(CHUNK, num_tokens)

        def chunks(x: Tensor) -> Tensor:  # -> [num_values, num_chunks, size, n]
            x = F.pad(x, (0, 0, 0, 0, 0, -num_tokens % size))
            return x.unflatten(0, (-1, size)).permute(2, 0, 1, 3)

        q, k, v = (chunks(x) for x in self._heads(qkv, before))
        decay = chunks(decay.unsqueeze(-1)).cumsum(2)
        rate = chunks(rate.unsqueeze(-1))
        between = (decay - decay.mT).exp().tril()  # decay from a token to later ones
        system = (k * rate) @ k.mT * between
        sides = torch.cat((v * rate, k * rate * decay.exp()), dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        new, old = solved.split((self.value_dim, self.key_dim), dim=-1)
        among = (q @ k.mT) * between
        last = decay[:, :, -1:]
        q = q * decay.exp()
        k = k * (last - decay).exp()
        faded = last.exp()
        out = torch.empty_like(new)
        for at in range(out.shape[1]):
            change = new[:, at] - old[:, at] @ matrix
            out[:, at] = q[:, at] @ matrix + among[:, at] @ change
            matrix.mul_(faded[:, at]).baddbmm_(k[:, at].mT, change)
        return out.permute(1, 2, 0, 3).flatten(0, 1)[:num_tokens]


class SharedMoE(SparseMoE):
    """Experts, and a gated shared expert for all tokens."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(**expert_options(spec), parallel=parallel)
        size = spec.config["shared_expert_intermediate_size"]
        spec = replace(spec, config=spec.config | {"intermediate_size": size})
        self.shared_expert = LlamaMLP(spec, parallel)
        self.shared_expert_gate = Router(spec.hidden_size, 1, parallel, bias=False)

    def shared(self, x: Tensor) -> Tensor:
        return self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


class Qwen3NextLayer(nn.Module):
    """A layer in which tokens interact by attention or by a gated delta net."""

    def __init__(
        self, spec: ModelSpec, norm: Callable[[], RMSNorm], mixer: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.is_linear = isinstance(mixer, GatedDeltaNet)
        self.input_layernorm = norm()
        if self.is_linear:
            self.linear_attn = mixer
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        mixed = self.linear_attn(x, ctx) if self.is_linear else self.self_attn(x, rotation, ctx)
        x, residual = self.post_attention_layernorm.add(mixed, residual)
        return self.mlp(x), residual


def linear_layers(spec: ModelSpec) -> list[bool]:
    """Return which layers have linear attention. Raises UnsupportedModel if all have it."""
    types = spec.config.get("layer_types")
    every = spec.config.get("full_attention_interval", 4)
    parts = [
        types[layer] == "linear_attention" if types else (layer + 1) % every > 0
        for layer in range(spec.num_layers)
    ]
    if all(parts):
        raise UnsupportedModel(
            "linear attention in all layers: at least one layer must have a KV cache"
        )
    return parts


def make_mixer(
    spec: ModelSpec, layer: int, parallel: Parallel, linear_class: type[GatedDeltaNet]
) -> nn.Module:
    is_linear = linear_layers(spec)
    if is_linear[layer]:
        return linear_class(spec, parallel)
    # Layers with attention are numbered by KV cache.
    return Qwen3NextAttention(spec, is_linear[:layer].count(False), parallel)


def convert_text(tensors: NamedTensors) -> NamedTensors:
    """Yield the tensors except the multi-token-prediction layer and the vision encoder."""
    for name, tensor in tensors:
        if not name.startswith(("mtp.", "model.visual.")):
            yield name.replace("model.language_model.", "model."), tensor


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """Qwen 3-Next's language model, whose norms have weights around 0."""

    layer_class = Qwen3NextLayer
    norm_class = OffsetRMSNorm
    rotary_class = Qwen3NextRotary
    convert = staticmethod(convert_text)

    @classmethod
    def make_attention(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        return make_mixer(spec, layer, parallel, GatedDeltaNet)

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if has_experts(spec.config, layer):
            return SharedMoE(spec, parallel)
        return LlamaMLP(spec, parallel)
