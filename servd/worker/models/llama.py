"""Llama 2 and 3 (https://arxiv.org/abs/2307.09288, https://arxiv.org/abs/2407.21783)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.attention import Norms
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Gate
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.norm import RMSNorm
from servd.worker.layers.rotary import Rotary, Rotation


class LlamaAttention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    query_parts: ClassVar[int] = 1  # outputs of q_proj per element of a query; 2: with a gate
    head_norm_class: ClassVar[type[RMSNorm] | None] = None  # norms q and k before the rotation

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__()
        qkv_bias, o_bias = self.biases(spec.config)
        q_size = spec.num_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.qkv_proj = self.qkv(spec.hidden_size, spec, parallel, bias=qkv_bias)
        self.o_proj = RowParallelLinear(q_size, spec.hidden_size, parallel, bias=o_bias)
        self.register_parameter("sinks", None)  # [heads], in models with attention sinks
        heads = parallel.share(spec.num_heads), parallel.share(spec.num_kv_heads)
        options = {"scale": spec.head_dim**-0.5} | self.options(spec.config, layer)
        self.attention = Attention(layer, *heads, spec.head_dim, **options)
        self.norms: Norms | None = None
        if self.head_norm_class is not None:
            eps = spec.config.get("rms_norm_eps", 1e-6)
            self.q_norm = self.head_norm_class(spec.head_dim, eps, parallel)
            self.k_norm = self.head_norm_class(spec.head_dim, eps, parallel)
            self.norms = self.q_norm, self.k_norm

    @classmethod
    def qkv(
        cls, in_features: int, spec: ModelSpec, parallel: Parallel, *, bias: bool
    ) -> ColumnParallelLinear:
        """Return the projection to queries, keys and values. If there are more ranks than key
        heads, several ranks hold the same key and value head.
        """
        q_size, kv_size = (count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads))
        num_copies = parallel.num_copies(spec.num_kv_heads)
        sizes = [cls.query_parts * q_size, kv_size, kv_size]
        copies = [1, num_copies, num_copies]
        return ColumnParallelLinear(in_features, sizes, parallel, bias=bias, copies=copies)

    @staticmethod
    def biases(config: dict[str, Any]) -> tuple[bool, bool]:
        """Return whether q, k, v have a bias, and whether the output projection has one."""
        bias = config.get("attention_bias", False)
        return bias, bias

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        """Return arguments of `Attention`, for layer number `layer`."""
        return {}

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q, k [num_tokens, heads * head_dim], normalized over all heads; here unchanged."""
        return q, k

    def forward(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.local_features, dim=-1)
        q, k = self.normalize(q, k)
        out = self.attention(q, k, v, ctx, rotation, self.sinks, self.norms)
        return self.o_proj(out)


class LlamaMLP(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel, size: int | None = None) -> None:
        super().__init__()
        inner: int = spec.config["intermediate_size"] if size is None else size
        bias = spec.config.get("mlp_bias", False)
        sizes = [inner, inner]
        self.gate_up_proj = ColumnParallelLinear(spec.hidden_size, sizes, parallel, bias=bias)
        self.down_proj = RowParallelLinear(inner, spec.hidden_size, parallel, bias=bias)
        config = spec.config
        self.gate = Gate(config.get("hidden_activation") or config.get("hidden_act", "silu"))

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, hidden] -> [num_tokens, hidden]
        return self.down_proj(self.gate(self.gate_up_proj(x)))


class LlamaLayer(nn.Module):
    """Attention and feed-forward; their outputs are added to the residual by the next norm."""

    def __init__(
        self, spec: ModelSpec, norm: Callable[[], RMSNorm], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the term that the next norm adds, and the residual: [num_tokens, hidden] each."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, rotation, ctx), residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    def __init__(self, spec: ModelSpec, parts: type[LlamaForCausalLM], parallel: Parallel) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        self.rotary = parts.rotary_class(spec)
        self.layers = parallel.layers(
            spec.num_layers, lambda number: parts.make_layer(spec, number, parallel)
        )
        self.norm = parts.make_norm(spec, parallel)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids; positions: see Rotary."""
        x = self.embed_tokens(input_ids)
        if ctx.images is not None:
            x = ctx.images.place(x)
        residual = None
        rotation = self.rotary(positions)
        for number, layer in enumerate(self.layers):
            x, residual = layer(x, residual, rotation, ctx)
            if ctx.images is not None:
                x = ctx.images.add_features(x, number)
        return self.norm.add(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """Llama's language model. Other models name the parts that are not Llama's."""

    layer_class: ClassVar[type[Any]] = LlamaLayer
    attention_class: ClassVar[type[nn.Module]] = LlamaAttention
    state_class: ClassVar[type[Any] | None] = None  # of layers without a KV cache
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    rotary_class: ClassVar[type[nn.Module]] = Rotary
    packed: ClassVar[dict[str, tuple[str, int]]] = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    ignored: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    base_prefix: ClassVar[str] = "model."
    is_tied: ClassVar[bool] = False  # default of tie_word_embeddings
    image_factor: float = 1.0  # on the embeddings of pictures; a model without it reads none

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.check_spec(spec)
        self.hidden_size = spec.hidden_size
        self.logit_cap: float | None = None
        self.model = LlamaModel(spec, type(self), parallel)
        self.lm_head = self.model.embed_tokens
        if not spec.config.get("tie_word_embeddings", self.is_tied):
            self.lm_head = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)

    @staticmethod
    def check_spec(spec: ModelSpec) -> None:
        """Raise UnsupportedModel if the model would compute config.json's settings wrongly."""

    @classmethod
    def make_layer(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        """Return layer number `layer`, made of the class's parts."""
        attention = cls.make_attention(spec, layer, parallel)
        mlp = cls.make_mlp(spec, layer, parallel)
        return cls.layer_class(spec, partial(cls.make_norm, spec, parallel), attention, mlp)

    @classmethod
    def make_norm(cls, spec: ModelSpec, parallel: Parallel) -> RMSNorm:
        return cls.norm_class(spec.hidden_size, spec.config.get("rms_norm_eps", 1e-6), parallel)

    @classmethod
    def make_attention(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if cls.state_class is None:
            return cls.attention_class(spec, layer, parallel)
        if layer not in spec.layers_with_cache:
            return cls.state_class(spec, parallel)
        return cls.attention_class(spec, spec.layers_with_cache.index(layer), parallel)

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        return LlamaMLP(spec, parallel)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        return self.model(input_ids, positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        logits = self.lm_head.logits(hidden)
        if self.logit_cap is None:
            return logits
        return (logits / self.logit_cap).tanh() * self.logit_cap
