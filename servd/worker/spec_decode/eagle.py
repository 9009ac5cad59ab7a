"""eagle: a decoder layer that predicts the target's next features and, from these, tokens (EAGLE 1
and 2, https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858).

The draft is a chain of likeliest tokens, as in vLLM.
"""

from collections.abc import Callable, Set
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import ModelSpec, read_spec
from servd.config.speculative import SpeculativeConfig
from servd.messages.engine import NewRequest
from servd.worker.attention import AttentionBatch
from servd.worker.batch.draft_chain import Pass
from servd.worker.batch.input_batch import AttentionRows, InputBatch
from servd.worker.device.device import at_hand, sent, upload
from servd.worker.kv import kv_cache
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.layers.rotary import Rotary
from servd.worker.loading.model_loader import tensor_shapes
from servd.worker.models.llama import LlamaForCausalLM
from servd.worker.sample import ops
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.spec_decode import Proposer, Target

# Prompts are skipped while drafts are rare: after about 100 steps without drafts, until about
# five steps had drafts.
INTEREST_MEMORY = 0.98
MOST_INTEREST = 40.0
LEAST_INTEREST = 5.0


def rename(name: str) -> str:
    name = name.removeprefix("model.").replace("fusion_fc.", "fc.", 1)
    for layer in ("midlayer.", "transformer."):  # EAGLE 3; EAGLE 1 in *speculators* format
        if name.startswith(layer):
            return "layers.0." + name.removeprefix(layer)
    return name


class Unnormed(nn.Module):
    """A replacement for a layer's norm that does nothing."""

    def add(self, x: Tensor, residual: None) -> tuple[Tensor, Tensor]:
        """Return the stream [num_tokens, hidden] twice."""
        return x, x


class EagleHead(nn.Module):
    """Predicts a token's feature from the previous token's feature (the target's last hidden state)
    and the token's embedding. `names`: names of the checkpoint's tensors. A head without an
    embedding or output head uses the target's.
    """

    packed: ClassVar[dict[str, tuple[str, int]]] = LlamaForCausalLM.packed
    ignored: ClassVar[tuple[str, ...]] = (*LlamaForCausalLM.ignored, "t2d")
    base_prefix: ClassVar[str] = ""

    def __init__(self, spec: ModelSpec, names: Set[str], target: Target) -> None:
        super().__init__()
        parallel = target.parallel
        self.num_read = target.spec.hidden_size
        self.make_layers(spec, names, target)
        self.rotary = Rotary(spec)
        self.ops = ops.for_device(target.backend.spec.device)
        parts = (part for _, part in target.model.named_modules())
        embeddings = (part.forward for part in parts if isinstance(part, VocabEmbedding))
        self.embed: Callable[[Tensor], Tensor] = next(embeddings)
        if "embed_tokens.weight" in names:
            self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)
            self.embed = self.embed_tokens.forward
        self.compute_logits: Callable[[Tensor], Tensor] = target.model.compute_logits
        if "lm_head.weight" in names:
            vocab_size = spec.config.get("draft_vocab_size") or spec.vocab_size
            self.lm_head = VocabEmbedding(vocab_size, spec.hidden_size, parallel)
            self.compute_logits = self.lm_head.logits

    def make_layers(self, spec: ModelSpec, names: Set[str], target: Target) -> None:
        size = spec.hidden_size
        parallel = target.parallel
        self.fc = ReplicatedLinear(2 * size, size, parallel, bias="fc.bias" in names)
        self.layers = nn.ModuleList(
            LlamaForCausalLM.make_layer(spec, layer, parallel) for layer in range(spec.num_layers)
        )
        self.layers[0].input_layernorm = Unnormed()

    def read(self, hidden: Tensor) -> Tensor:
        """Return the input of `features` for a step with hidden states [num_tokens, hidden]:
        `num_read` numbers for each token.
        """
        return hidden

    def features(self, read: Tensor) -> Tensor:  # [n, num_read] -> [n, hidden]
        return read

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Return features of `token_ids`, int64 [num_tokens]. `features`, [num_tokens, hidden], and
        `positions`, int64 [num_tokens], are those of the previous tokens.
        """
        x, residual = self.enter(self.embed(token_ids), features)
        rotation = self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, ctx)
        assert residual is not None
        return self.leave(x, residual)

    def leave(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return features from the last layer's output and the stream: [num_tokens, hidden]."""
        return x + residual

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the first layer's input; embeddings and features are [num_tokens, hidden] each."""
        return self.fc(torch.cat((embedded, features), dim=-1)), None

    def top(self, features: Tensor) -> Tensor:
        """Return the likeliest tokens after the features' tokens, int64 [n], for [n, hidden]."""
        return self.ops.edit_logits(self.compute_logits(features), LogitEdits())


class EagleProposer(Proposer):
    """Runs the head over tokens with the target's features, then on its own predictions, token by
    token. Keys and values of tokens that may be rejected are recomputed before any later token
    reads them.

    Computes rows that verify or need drafts and, unless drafts were rare recently, prompts. Other
    tokens are skipped: the head's cache continues without them. So the head's cache has only
    computed tokens, and a step without drafts costs nothing. Blocks from the prefix cache may lack
    skipped tokens, or were computed with the next token of another request: drafts after them may
    be worse.
    """

    head_class: ClassVar[type[EagleHead]] = EagleHead
    rename = staticmethod(rename)

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        folder = self.find_folder(target)
        self.spec = read_spec(folder)
        names = self.find_names(folder)
        self.check(names)
        self.head = target.load(
            lambda: self.head_class(self.spec, names, target), folder, self.rename
        )
        self.backend = target.make_backend(self.head)
        # Tokens of each slot that the head has: int64 [slots], on the device, as only the device
        # knows how many drafts were kept.
        self.num_followed = torch.zeros_like(self.states.num_computed)
        # Recent steps that wanted drafts; old ones count less.
        self.interest = MOST_INTEREST

    def find_folder(self, target: Target) -> str:
        return target.find_draft()

    def find_names(self, folder: str) -> set[str]:
        return {self.rename(name) for name in tensor_shapes(folder)}

    def check(self, names: Set[str]) -> None:
        spec = self.spec
        target_spec = self.target.spec
        self.check_size("tokens in the vocabulary", spec.vocab_size, target_spec.vocab_size)
        self.check_size("numbers in a hidden state", spec.hidden_size, target_spec.hidden_size)

    def check_size(self, what: str, size: int, target_size: int) -> None:
        if size != target_size:
            raise ConfigError(
                f"--speculative-config: {self.config.model} has {size} {what} but the model has "
                f"{target_size}; use a head of this model"
            )

    @property
    def bytes_per_block(self) -> int:
        return kv_cache.bytes_per_block(self.backend, self.head)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.kv_caches = kv_cache.allocate(self.backend, self.head, num_blocks)
        max_num_seqs = self.states.max_num_seqs
        self.max_num_rows = (self.config.num_speculative_tokens + 1) * max_num_seqs
        self.chain = self.target.make_chain(self, max_num_seqs, self.max_num_rows)

    def add(self, request: NewRequest) -> None:
        """Note that a request enters its slot. The head's blocks are cached like the target's."""
        self.num_followed[request.slot] = request.num_computed_tokens

    def follow(self, batch: InputBatch, hidden: Tensor, num_kept: Tensor | None) -> None:
        """Run the head over prompts, and rows that verify or need drafts."""
        if batch.is_plain:
            self.interest *= INTEREST_MEMORY
            return
        lens = np.ascontiguousarray(batch.query_lens)  # as kernels read it
        wants = batch.max_new_drafts > 0
        if wants.any():
            self.interest = min(self.interest + 1, MOST_INTEREST)
        elif (lens == 1).any():
            self.interest *= INTEREST_MEMORY
        runs = wants | (lens > 1 if self.interest > LEAST_INTEREST else batch.num_drafts > 0)
        rows = np.flatnonzero(runs)
        if not len(rows):
            return
        device = hidden.device
        read = self.head.read(hidden)
        slots, positions = map(at_hand, batch.tokens[:2])
        # For each row, the index in it of the last token that is known or kept.
        newest = at_hand(batch.ends(num_kept)) - sent(lens.cumsum() - lens, device)
        if len(rows) < len(runs):
            chosen = np.flatnonzero(np.repeat(runs, lens))
            read = read[upload(chosen, device)]
            tokens = sent(chosen, device)
            slots = slots[tokens]
            positions = positions[tokens]
            newest = newest[sent(rows, device)]
            lens = lens[rows]
            wants = wants[rows]
        ends = lens.cumsum()
        firsts = ends - lens
        followed = at_hand(self.num_followed)
        columns = followed[slots] + sent(np.arange(ends[-1]) - firsts.repeat(lens), device)
        followed[sent(batch.host_slots[rows], device)] += newest + 1
        attention_rows = None
        if ends[-1] > self.max_num_rows or (lens > batch.num_drafts[rows] + 1).any():
            bounds = columns[ends - 1] + 1 if device.type == "cpu" else batch.seq_lens[rows]
            attention_rows = AttentionRows(lens, bounds, upload(ends - 1, device))
        last = sent(firsts, device) + newest
        if not wants.all():
            last = last[sent(np.flatnonzero(wants), device)]
        next_ids = at_hand(self.states.read(*map(torch.as_tensor, (slots, positions + 1))))
        self.first = Pass(next_ids, positions, slots, columns, (read,), last, attention_rows)
        if not len(last):
            self.chain.run(self.first)
        self.limits = batch.max_new_drafts[rows][wants]

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> Tensor:
        """Return a chain of likeliest tokens, up to `max_model_len`."""
        rows = at_hand(slots)
        newest = at_hand(self.states.num_computed)[at_hand(slots)]
        depths = at_hand(self.after)[: num_drafts - 1, None] - 1
        # Rows have no blocks for more; positions from the newest token on are computed again.
        if self.limits.min() < num_drafts - 1:
            depths = depths.clip(max=sent(self.limits - 1, slots.device))
        columns = at_hand(self.num_followed)[rows] + depths  # [num_drafts - 1, n]
        drafts = self.chain(self.first, rows, newest + depths, columns)
        max_model_len = self.config.max_model_len or self.states.max_model_len
        if max_len + num_drafts <= max_model_len:
            return drafts
        return drafts.masked_fill_(
            self.after[:num_drafts] >= max_model_len - torch.as_tensor(newest).unsqueeze(1), -1
        )

    def top(self, features: Tensor) -> Tensor:
        return self.head.top(features)

    def advance(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, features: Tensor
    ) -> Tensor:
        ctx = ForwardContext(self.backend, attention, self.kv_caches)
        return self.head(token_ids, features, positions, ctx)

    def begin(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, *read: Tensor
    ) -> Tensor:
        return self.advance(token_ids, positions, attention, self.head.features(*read))
