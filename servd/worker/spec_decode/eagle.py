"""eagle: a decoder layer that guesses the target's next features and, by them, tokens
(EAGLE 1 and 2, https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858).

The draft is a chain of likeliest tokens, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import ClassVar

import torch
from torch import Tensor, nn

from servd.errors import ConfigError
from servd.hf import ModelSpec, read_spec
from servd.speculative import SpeculativeConfig
from servd.worker import kv_cache
from servd.worker.attention import AttentionBatch
from servd.worker.input_batch import InputBatch, decode_attention
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.layers.rotary import Rotary
from servd.worker.model_loader import tensor_shapes
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer
from servd.worker.spec_decode import Proposer, Target, last_kept


def rename(name: str) -> str:
    """The name here of a checkpoint's tensor."""
    name = name.removeprefix("model.").replace("fusion_fc.", "fc.", 1)
    for layer in ("midlayer.", "transformer."):  # EAGLE 3; EAGLE 1 in *speculators* format
        if name.startswith(layer):
            return "layers.0." + name.removeprefix(layer)
    return name


class Unnormed(nn.Module):
    """Stands where a layer has a norm."""

    def add(self, x: Tensor, residual: None) -> tuple[Tensor, Tensor]:
        """The first of the stream, [num_tokens, hidden], twice."""
        return x, x


class EagleHead(nn.Module):
    """Reads the feature of a token, which is the target's last hidden state, beside the embedding
    of the token after it, and makes the feature of that one.

    Args:
        spec: the head's.
        names: of the checkpoint's tensors; the target has the embedding and the output head if it
            has none.
        target: whose features they are.
    """

    packed: ClassVar[dict[str, tuple[str, int]]] = LlamaForCausalLM.packed
    ignored: ClassVar[tuple[str, ...]] = (*LlamaForCausalLM.ignored, "t2d")
    base_prefix: ClassVar[str] = ""

    def __init__(self, spec: ModelSpec, names: Set[str], target: Target) -> None:
        super().__init__()
        parallel = target.parallel
        self.make_layers(spec, names, target)
        self.rotary = Rotary(spec)
        self.embed: Callable[[Tensor], Tensor] = embedding_of(target)
        if "embed_tokens.weight" in names:
            self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)
            self.embed = self.embed_tokens.forward
        self.compute_logits: Callable[[Tensor], Tensor] = target.model.compute_logits
        if "lm_head.weight" in names:
            vocab_size = spec.config.get("draft_vocab_size") or spec.vocab_size
            self.lm_head = VocabEmbedding(vocab_size, spec.hidden_size, parallel)
            self.compute_logits = self.lm_head.logits

    def make_layers(self, spec: ModelSpec, names: Set[str], target: Target) -> None:
        """What `forward` goes through."""
        size, parallel = spec.hidden_size, target.parallel
        self.fc = ReplicatedLinear(2 * size, size, parallel, bias="fc.bias" in names)
        self.layers = nn.ModuleList(
            LlamaLayer(spec, LlamaAttention(spec, layer, parallel), parallel)
            for layer in range(spec.num_layers)
        )
        self.layers[0].input_layernorm = Unnormed()

    def features(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """The features of a step, of its hidden states; [num_tokens, hidden] each."""
        return hidden

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Features of the tokens after `features`.

        Args:
            token_ids: these tokens, int64 [num_tokens].
            features: of the tokens before them, [num_tokens, hidden].
            positions: of the tokens before them, int64 [num_tokens].
            ctx: with the cache of this layer.
        """
        x, residual = self.enter(self.embed(token_ids), features)
        rotation = self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, ctx)
        assert residual is not None
        return x + residual

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the first layer gets of embeddings and features, [num_tokens, hidden] each."""
        return self.fc(torch.cat((embedded, features), dim=-1)), None

    def top(self, features: Tensor) -> Tensor:
        """[n, hidden] -> the likeliest tokens after those of the features, int64 [n]."""
        return self.compute_logits(features).argmax(-1)


def embedding_of(target: Target) -> Callable[[Tensor], Tensor]:
    """The target's token embedding."""
    parts = (part for _, part in target.model.named_modules())
    return next(part.forward for part in parts if isinstance(part, VocabEmbedding))


class EagleProposer(Proposer):
    """Runs the head over all tokens of a step, with the target's features, then on by itself, token
    by token. It writes keys and values of positions whose tokens may turn out to be others; but
    these are computed again before any later token reads them. Only those of the last token of a
    block in the prefix cache may have been made with the next token of another request: drafts
    after it may be worse.
    """

    head_class: ClassVar[type[EagleHead]] = EagleHead

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        folder = target.find_draft()
        self.spec = read_spec(folder)
        names = {rename(name) for name in tensor_shapes(folder)}
        self.check(names)
        self.head = target.load(lambda: self.head_class(self.spec, names, target), folder, rename)
        self.backend = target.make_backend(self.spec, sliding_window=None)
        # Of the newest token of each slot, which the target has not computed yet.
        self.features = torch.zeros(
            (target.states.max_num_seqs + 1, self.spec.hidden_size),
            dtype=self.backend.spec.dtype,
            device=self.backend.spec.device,
        )

    def check(self, names: Set[str]) -> None:
        """See that the head is for the target.

        Raises:
            ConfigError: it is not.
        """
        for what, own, wanted in (
            ("tokens in the vocabulary", self.spec.vocab_size, self.target.spec.vocab_size),
            ("numbers in a hidden state", self.spec.hidden_size, self.target.spec.hidden_size),
        ):
            if own != wanted:
                raise ConfigError(
                    f"--speculative-config: {self.config.model} has {own} {what} and the model "
                    f"has {wanted}; name a head that was trained for it"
                )

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of its layers."""
        return kv_cache.bytes_per_block(self.backend, self.spec.num_layers)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """For the same blocks as the target's."""
        self.kv_caches = kv_cache.allocate(self.backend, self.spec, num_blocks)

    def follow(self, batch: InputBatch, hidden: Tensor) -> None:
        """The token after each of the step's is known, or drafted."""
        slots, positions = batch.tokens
        next_ids = self.states.token_ids[slots, positions + 1].long()
        features = self.head.features(batch, hidden)
        features = self._run(next_ids, features, positions, batch.attention)
        slots, tokens = last_kept(batch)
        self.features[slots] = features[tokens]

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> tuple[Tensor, Tensor]:
        """A chain of likeliest tokens, up to `max_model_len`."""
        newest = self.states.num_computed[slots]
        # A row has blocks for no more; positions from the newest token's on are computed again.
        last = newest + self.states.num_drafts[slots] - 1
        features = self.features[slots]
        drafts = [self.head.top(features)]
        for depth in range(num_drafts - 1):
            positions = torch.minimum(newest + depth, last)
            attention = decode_attention(self.states, slots, positions)
            features = self._run(drafts[-1], features, positions, attention)
            drafts.append(self.head.top(features))
        room = (self.config.max_model_len or self.states.max_model_len) - 1 - newest
        return torch.stack(drafts, dim=1), room.clamp(0, num_drafts)

    def _run(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attention: AttentionBatch
    ) -> Tensor:
        ctx = ForwardContext(self.backend, self.backend.build_metadata(attention), self.kv_caches)
        return self.head(token_ids, features, positions, ctx)


Proposer = EagleProposer  # the name that every file of this package has
