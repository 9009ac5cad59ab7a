"""ModernBERT (https://arxiv.org/abs/2412.13663): an encoder with rotary positions, gated
feed-forward, and local attention in most layers.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.pooling import num_labels
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Activation, Gate
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from servd.worker.layers.norm import LayerNorm
from servd.worker.layers.rotary import Rotary, Rotation

FULL = "full_attention"
LOCAL = "sliding_attention"


def layer_types(config: dict[str, Any], num_layers: int) -> list[str]:
    every = config.get("global_attn_every_n_layers", 3)
    return config.get("layer_types") or [LOCAL if i % every else FULL for i in range(num_layers)]


def make_rotary(spec: ModelSpec, layer_type: str) -> Rotary:
    config = spec.config
    name, theta = {FULL: ("global_rope_theta", 160000.0), LOCAL: ("local_rope_theta", 10000.0)}[
        layer_type
    ]
    rope = (config.get("rope_parameters") or {}).get(layer_type) or {}
    rope = {"rope_theta": config.get(name, theta)} | rope | (config.get("rope_scaling") or {})
    return Rotary(msgspec.structs.replace(spec, config={"rope_parameters": rope}))


def norm(spec: ModelSpec, parallel: Parallel) -> LayerNorm:
    config = spec.config
    eps = config.get("norm_eps", 1e-5)
    return LayerNorm(spec.hidden_size, eps, parallel, bias=config.get("norm_bias", False))


class ModernBertEmbeddings(nn.Module):
    """Embeds tokens only, because positions are rotary."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.tok_embeddings = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        self.norm = norm(spec, parallel)

    def forward(self, input_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        return self.norm.add(self.tok_embeddings(input_ids), None)[0]


class ModernBertAttention(nn.Module):
    """Bidirectional multi-head self-attention, global or within a window."""

    def __init__(self, spec: ModelSpec, layer_type: str, parallel: Parallel) -> None:
        super().__init__()
        size = spec.hidden_size
        bias = spec.config.get("attention_bias", False)
        self.Wqkv = ColumnParallelLinear(size, [size, size, size], parallel, bias=bias)
        self.Wo = RowParallelLinear(size, size, parallel, bias=bias)
        num_heads = parallel.share(spec.num_heads)
        half = spec.config["local_attention"] // 2
        window = half + 1 if layer_type == LOCAL else None
        shape = num_heads, num_heads, spec.head_dim
        options: dict[str, Any] = {"sliding_window": window, "is_causal": False}
        self.attention = Attention(0, *shape, spec.head_dim**-0.5, **options)

    def forward(self, x: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        q, k, v = self.Wqkv(x).chunk(3, dim=-1)
        return self.Wo(self.attention(q, k, v, ctx, rotation))


class ModernBertMLP(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        size = spec.hidden_size
        inner = spec.config["intermediate_size"]
        bias = spec.config.get("mlp_bias", False)
        self.Wi = ColumnParallelLinear(size, [inner, inner], parallel, bias=bias)
        self.Wo = RowParallelLinear(inner, size, parallel, bias=bias)
        self.gate = Gate(spec.config.get("hidden_activation", "gelu"))

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, hidden] -> [num_tokens, hidden]
        return self.Wo(self.gate(self.Wi(x)))


class ModernBertLayer(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, layer_type: str, parallel: Parallel) -> None:
        super().__init__()
        self.layer_type = layer_type
        # The first layer's input is normed already.
        self.attn_norm = norm(spec, parallel) if layer else None
        self.attn = ModernBertAttention(spec, layer_type, parallel)
        self.mlp_norm = norm(spec, parallel)
        self.mlp = ModernBertMLP(spec, parallel)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotations: dict[str, Rotation],
        ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """Return the term that the next norm adds, and the residual: [num_tokens, hidden] each."""
        x, residual = (x, x) if self.attn_norm is None else self.attn_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attn(x, rotations[self.layer_type], ctx), residual)
        return self.mlp(x), residual


class ModernBertModel(nn.Module):
    packed: ClassVar[dict[str, tuple[str, int]]] = {}
    ignored: ClassVar[tuple[str, ...]] = (
        "head.dense.weight",
        "head.dense.bias",
        "head.norm.weight",
        "head.norm.bias",
        "decoder.weight",
        "decoder.bias",
    )
    base_prefix: ClassVar[str] = ""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.embeddings = ModernBertEmbeddings(spec, parallel)
        types = layer_types(spec.config, spec.num_layers)
        self.rotaries = nn.ModuleDict(
            {layer_type: make_rotary(spec, layer_type) for layer_type in (FULL, LOCAL)}
        )
        self.layers = nn.ModuleList(
            ModernBertLayer(spec, layer, layer_type, parallel)
            for layer, layer_type in enumerate(types)
        )
        self.final_norm = norm(spec, parallel)

    def convert(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors without the prefix `model.`, which checkpoints with a head have."""
        for name, tensor in tensors:
            yield name.removeprefix("model."), tensor

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        x = self.embeddings(input_ids)
        residual = None
        rotations = {layer_type: rotary(positions) for layer_type, rotary in self.rotaries.items()}
        for layer in self.layers:
            x, residual = layer(x, residual, rotations, ctx)
        return self.final_norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return a placeholder [n, 1] for hidden [n, hidden]: encoders predict no next token."""
        return hidden.new_zeros(len(hidden), 1)


class ModernBertForMaskedLM(ModernBertModel):
    """Makes embeddings, without the head that predicts tokens."""


class ModernBertPredictionHead(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        size = spec.hidden_size
        config = spec.config
        bias = config.get("classifier_bias", False)
        self.dense = ReplicatedLinear(size, size, parallel, bias=bias)
        self.act = Activation(config.get("classifier_activation", "gelu"))
        self.norm = norm(spec, parallel)

    def forward(self, x: Tensor) -> Tensor:  # [n, hidden] -> [n, hidden]
        return self.norm.add(self.act(self.dense(x)), None)[0]


class ModernBertForSequenceClassification(ModernBertModel):
    """An encoder with a head of two layers on the first token, or on the mean of all tokens."""

    ignored: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        self.head = ModernBertPredictionHead(spec, parallel)
        labels = num_labels(spec.config)
        self.classifier = ReplicatedLinear(spec.hidden_size, labels, parallel, bias=True)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, num_labels] for pooled vectors [n, hidden]."""
        return self.classifier(self.head(hidden))
