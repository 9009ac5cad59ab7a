"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

from typing import ClassVar

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Activation
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.embedding import Embedding, VocabEmbedding
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.norm import LayerNorm


class GPT2Attention(nn.Module):
    """Multi-head self-attention; the checkpoint stores its weights as [in, out]."""

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__()
        size = spec.hidden_size
        self.c_attn = ColumnParallelLinear(size, 3 * [size], parallel, bias=True, transposed=True)
        self.c_proj = RowParallelLinear(size, size, parallel, bias=True, transposed=True)
        num_heads = parallel.share(spec.num_heads)
        scale = spec.head_dim**-0.5 if spec.config.get("scale_attn_weights", True) else 1.0
        self.attention = Attention(layer, num_heads, num_heads, spec.head_dim, scale)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        return self.c_proj(self.attention(q, k, v, ctx))


class GPT2MLP(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        hidden = spec.hidden_size
        inner = spec.config.get("n_inner") or 4 * hidden
        self.c_fc = ColumnParallelLinear(hidden, [inner], parallel, bias=True, transposed=True)
        self.c_proj = RowParallelLinear(inner, hidden, parallel, bias=True, transposed=True)
        self.act = Activation(spec.config.get("activation_function", "gelu_new"))

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, hidden] -> [num_tokens, hidden]
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Layer(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__()
        eps = spec.config.get("layer_norm_epsilon", 1e-5)
        self.ln_1 = LayerNorm(spec.hidden_size, eps, parallel)
        self.attn = GPT2Attention(spec, layer, parallel)
        self.ln_2 = LayerNorm(spec.hidden_size, eps, parallel)
        self.mlp = GPT2MLP(spec, parallel)

    def forward(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the term that the next norm adds, and the residual: [num_tokens, hidden] each."""
        x, residual = self.ln_1.add(x, residual)
        x, residual = self.ln_2.add(self.attn(x, ctx), residual)
        return self.mlp(x), residual


class GPT2Model(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.wte = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        self.wpe = Embedding(spec.max_position_embeddings, spec.hidden_size, parallel)
        self.h = parallel.layers(spec.num_layers, lambda layer: GPT2Layer(spec, layer, parallel))
        eps = spec.config.get("layer_norm_epsilon", 1e-5)
        self.ln_f = LayerNorm(spec.hidden_size, eps, parallel)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        x = self.wte(input_ids)
        residual = self.wpe(positions)
        for layer in self.h:
            x, residual = layer(x, residual, ctx)
        return self.ln_f.add(x, residual)[0]


class GPT2LMHeadModel(nn.Module):
    packed: ClassVar[dict[str, tuple[str, int]]] = {}
    # Causal masks of old checkpoints.
    ignored: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")
    base_prefix: ClassVar[str] = "transformer."

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.transformer = GPT2Model(spec, parallel)
        self.lm_head = self.transformer.wte
        if not spec.config.get("tie_word_embeddings", True):
            self.lm_head = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        return self.transformer(input_ids, positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        return self.lm_head.logits(hidden)
