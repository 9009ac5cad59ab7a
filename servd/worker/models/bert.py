"""BERT (https://arxiv.org/abs/1810.04805): an encoder with bidirectional attention."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.pooling import SECOND_TEXT, first_position, num_labels
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Activation
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.embedding import Embedding, VocabEmbedding
from servd.worker.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from servd.worker.layers.norm import LayerNorm
from servd.worker.layers.rotary import Rotation

# Parts of names in the checkpoint -> parts of names here.
NAMES = {
    "LayerNorm.gamma": "LayerNorm.weight",  # checkpoints from TensorFlow
    "LayerNorm.beta": "LayerNorm.bias",
    "bert.": "",
    "roberta.": "",
    "encoder.layer.": "layers.",
    "attention.self.": "attention.",
    "attention.output.dense": "attention.dense",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "mlp_norm",
}
UNUSED = ("cls.", "lm_head.")  # heads that predict masked tokens


class BertEmbeddings(nn.Module):
    """Sums embeddings of tokens, positions and texts (first or second). `first_position`: position
    of the first token; None for rotary positions.
    """

    def __init__(self, spec: ModelSpec, parallel: Parallel, first_position: int | None) -> None:
        super().__init__()
        size = spec.hidden_size
        num_types = spec.config.get("type_vocab_size", 2)
        self.first_position = first_position
        self.last_type = max(num_types - 1, 0)
        self.word_embeddings = VocabEmbedding(spec.vocab_size, size, parallel)
        if first_position is not None:
            num_positions = spec.config["max_position_embeddings"]
            self.position_embeddings = Embedding(num_positions, size, parallel)
        self.token_type_embeddings = Embedding(num_types, size, parallel) if num_types else None
        self.LayerNorm = LayerNorm(size, spec.config.get("layer_norm_eps", 1e-12), parallel)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings [num_tokens, hidden] for [num_tokens] ids and positions."""
        x = self.word_embeddings(input_ids & ~SECOND_TEXT)
        if self.token_type_embeddings is not None:
            types = (input_ids >= SECOND_TEXT).long().clamp(max=self.last_type)
            x = x + self.token_type_embeddings(types)
        if self.first_position is None:
            return self.LayerNorm.add(x, None)[0]
        return self.LayerNorm.add(x, self.position_embeddings(positions + self.first_position))[0]


class BertAttention(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        size = spec.hidden_size
        num_heads = parallel.share(spec.num_heads)
        self.qkv = ColumnParallelLinear(size, [size, size, size], parallel, bias=True)
        self.dense = RowParallelLinear(size, size, parallel, bias=True)
        scale = spec.head_dim**-0.5
        self.attention = Attention(0, num_heads, num_heads, spec.head_dim, scale, is_causal=False)

    def forward(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        return self.dense(self.attention(*self.qkv(x).chunk(3, dim=-1), ctx, rotation))


class BertLayer(nn.Module):
    """Attention and feed-forward, each normed after the residual is added."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        size = spec.hidden_size
        eps = spec.config.get("layer_norm_eps", 1e-12)
        inner = spec.config["intermediate_size"]
        self.attention = BertAttention(spec, parallel)
        self.attention_norm = LayerNorm(size, eps, parallel)
        self.up = ColumnParallelLinear(size, [inner], parallel, bias=True)
        self.down = RowParallelLinear(inner, size, parallel, bias=True)
        self.mlp_norm = LayerNorm(size, eps, parallel)
        self.act = Activation(spec.config.get("hidden_act", "gelu"))

    def forward(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        x = self.attention_norm.add(self.attention(x, rotation, ctx), x)[0]
        return self.mlp_norm.add(self.down(self.act(self.up(x))), x)[0]


class BertModel(nn.Module):
    layer: ClassVar[type[BertLayer]] = BertLayer
    names: ClassVar[dict[str, str]] = NAMES
    packed: ClassVar[dict[str, tuple[str, int]]] = {
        "query": ("qkv", 0),
        "key": ("qkv", 1),
        "value": ("qkv", 2),
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    )
    base_prefix: ClassVar[str] = ""
    # Row of the position table for the first token; None without a table.
    first_position: ClassVar[Callable[[ModelSpec], int | None]] = staticmethod(first_position)

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(spec, parallel, type(self).first_position(spec))
        self.layers = nn.ModuleList(self.layer(spec, parallel) for _ in range(spec.num_layers))

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Return the rotation of positions [num_tokens]; None without rotary positions."""
        return None

    def convert(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if not name.startswith(UNUSED):
                for old, new in self.names.items():
                    name = name.replace(old, new)
                yield name, tensor

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        x = self.embeddings(input_ids, positions)
        rotation = self.rotation(positions)
        for layer in self.layers:
            x = layer(x, rotation, ctx)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return a placeholder [n, 1] for hidden [n, hidden]: encoders predict no next token."""
        return hidden.new_zeros(len(hidden), 1)


BertForMaskedLM = BertModel  # embeds without its head


class BertForSequenceClassification(nn.Module):
    """An encoder, with the pooler and a head on the first token."""

    encoder_class: ClassVar[type[BertModel]] = BertModel
    ignored: ClassVar[tuple[str, ...]] = ("position_ids",)
    base_prefix: ClassVar[str] = "encoder."

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.encoder = self.encoder_class(spec, parallel)
        self.packed = self.encoder.packed
        self.convert = self.encoder.convert
        self.make_head(spec.hidden_size, num_labels(spec.config), parallel)

    def make_head(self, size: int, num_labels: int, parallel: Parallel) -> None:
        self.pooler = nn.ModuleDict({"dense": ReplicatedLinear(size, size, parallel, bias=True)})
        self.classifier: Any = ReplicatedLinear(size, num_labels, parallel, bias=True)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        return self.encoder(input_ids, positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, num_labels] for the hidden states [n, hidden] of first tokens."""
        return self.classifier(self.pooler["dense"](hidden).tanh())
