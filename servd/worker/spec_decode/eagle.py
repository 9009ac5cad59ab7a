"""eagle: a decoder layer that guesses the target's next features and, by them, tokens
(EAGLE 1 and 2, https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858).

The draft is a chain of likeliest tokens, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from servd.errors import ConfigError
from servd.hf import ModelSpec, read_spec
from servd.messages import NewRequest
from servd.speculative import SpeculativeConfig
from servd.worker import kv_cache
from servd.worker.attention import AttentionBatch
from servd.worker.device import upload
from servd.worker.input_batch import AttentionRows, InputBatch, decode_attention
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.layers.rotary import Rotary
from servd.worker.model_loader import tensor_shapes
from servd.worker.models.llama import LlamaForCausalLM, LlamaLayer
from servd.worker.sample import ops
from servd.worker.sample.shift import Shift
from servd.worker.spec_decode import Proposer, Target

MOST_BEHIND = 32  # tokens of a row that it can catch up with
MOST_IN_ROWS = 8  # of a row, where each token is a row of the attention


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
        self.num_read = target.spec.hidden_size
        self.make_layers(spec, names, target)
        self.rotary = Rotary(spec)
        self.ops = ops.for_device(target.backend.spec.device)
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
            LlamaLayer(spec, layer, parallel) for layer in range(spec.num_layers)
        )
        self.layers[0].input_layernorm = Unnormed()

    def read(self, hidden: Tensor) -> Tensor:
        """What `features` needs of a step, of its hidden states [num_tokens, hidden]; `num_read`
        numbers for each token.
        """
        return hidden

    def features(self, read: Tensor) -> Tensor:
        """[n, num_read] -> [n, hidden]."""
        return read

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
        return self.leave(x, residual)

    def leave(self, x: Tensor, residual: Tensor) -> Tensor:
        """Features, of what the last layer yields and the stream, [num_tokens, hidden] each."""
        return x + residual

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the first layer gets of embeddings and features, [num_tokens, hidden] each."""
        return self.fc(torch.cat((embedded, features), dim=-1)), None

    def top(self, features: Tensor) -> Tensor:
        """[n, hidden] -> the likeliest tokens after those of the features, int64 [n]."""
        return self.ops.shift(self.compute_logits(features), Shift())


def embedding_of(target: Target) -> Callable[[Tensor], Tensor]:
    """The target's token embedding."""
    parts = (part for _, part in target.model.named_modules())
    return next(part.forward for part in parts if isinstance(part, VocabEmbedding))


class EagleProposer(Proposer):
    """Runs the head over tokens with the target's features, then on by itself, token by token. It
    writes keys and values of positions whose tokens may turn out to be others; but these are
    computed again before any later token reads them.

    A row that wants no drafts only keeps the features of its tokens, to catch up when it wants
    some. After more than a few it does not, as drafts do not pay, and the tokens are skipped: the
    head's cache goes on without them, so that the places of a row in its blocks are its positions
    less `skipped`. Long prompts are followed at once. Blocks that the prefix cache lends may have
    keys and values of skipped tokens, or made with the next token of another request: drafts after
    them may be worse.
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
        num_slots = self.states.max_num_seqs + 1
        # Tokens that the target has computed and the head has not: [slot, position % kept].
        self.kept = torch.zeros(
            (num_slots, MOST_BEHIND, self.head.num_read),
            dtype=self.backend.spec.dtype,
            device=self.backend.spec.device,
        )
        # Those of the last steps, not yet there: slots, positions and what was read; and the most
        # tokens of a row among them.
        self.recent: list[tuple[Tensor, Tensor, Tensor]] = []
        self.num_recent = 0
        self.num_skipped: Tensor | None = None  # of the rows that draft; None: nothing
        # How many of each slot, and how many it never will.
        self.behind, self.skipped = np.zeros((2, num_slots), dtype=np.int64)

    def find_folder(self, target: Target) -> str:
        """Where the head's checkpoint is."""
        return target.find_draft()

    def find_names(self, folder: str) -> set[str]:
        """Those that the head's tensors have here."""
        return {self.rename(name) for name in tensor_shapes(folder)}

    def check(self, names: Set[str]) -> None:
        """See that the head is for the target.

        Raises:
            ConfigError: it is not.
        """
        own, wanted = self.spec, self.target.spec
        self.check_size("tokens in the vocabulary", own.vocab_size, wanted.vocab_size)
        self.check_size("numbers in a hidden state", own.hidden_size, wanted.hidden_size)

    def check_size(self, what: str, own: int, wanted: int) -> None:
        """See that a size of the head is that of the target.

        Raises:
            ConfigError: it is not.
        """
        if own != wanted:
            raise ConfigError(
                f"--speculative-config: {self.config.model} has {own} {what} and the model has "
                f"{wanted}; name a head that was trained for it"
            )

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of its layers."""
        return kv_cache.bytes_per_block(self.backend, self.head)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """For the same blocks as the target's."""
        self.kv_caches = kv_cache.allocate(self.backend, self.head, num_blocks)
        max_num_seqs = self.states.max_num_seqs
        self.max_num_rows = (self.config.num_speculative_tokens + 1) * max_num_seqs
        self.passes = self.target.make_passes(self._follow, self.max_num_rows)
        self.chain = self.target.make_chain(self, max_num_seqs)

    def add(self, request: NewRequest) -> None:
        """What the prefix cache has of the target, it has of the head."""
        self._keep_recent()  # tokens of the slot's last request
        self.behind[request.slot] = self.skipped[request.slot] = 0

    def follow(self, batch: InputBatch, hidden: Tensor, num_kept: Tensor | None) -> None:
        """Catch up with rows that want drafts, or whose tokens are drafts or too many to be kept;
        keep what the others will need for it.
        """
        behind = self.behind[batch.host_slots] + batch.query_lens
        slots, positions = batch.tokens[:2]
        if batch.is_plain:
            self.behind[batch.host_slots] = behind
            if behind.min() <= MOST_BEHIND:  # else nobody has drafted for long
                self._keep(slots, positions, hidden, self.head.read(hidden), 1)
            return
        wants = batch.max_new_drafts > 0
        runs = wants | (batch.num_drafts > 0) | (batch.query_lens > MOST_BEHIND)  # [num_rows]
        read = self.head.read(hidden)
        if runs.any():
            self._keep_recent()
            is_along = runs.all() and not self.behind[batch.host_slots].any()
            if is_along and (self._is_decode(batch) or not self.skipped[batch.host_slots].any()):
                return self._go_along(batch, read, num_kept)
            self._catch_up(batch, read, np.flatnonzero(runs), wants[runs])
            behind[runs] = 0
            tokens = upload(np.flatnonzero(np.repeat(~runs, batch.query_lens)), read.device)
            slots, positions, read = slots[tokens], positions[tokens], read[tokens]
        self.behind[batch.host_slots] = behind
        if len(slots):
            longest = int(batch.query_lens.max(where=~runs, initial=0))
            self._keep(slots, positions, hidden, read, longest)

    def _keep(
        self, slots: Tensor, positions: Tensor, hidden: Tensor, read: Tensor, longest: int
    ) -> None:
        """Keep what was read of tokens, of which no row has more than `longest`."""
        if self.num_recent + longest > MOST_BEHIND:
            self._keep_recent()
        # Hidden states, and tokens that decode, are where the next step's will be.
        slots, positions = torch.stack((slots, positions))
        self.recent.append((slots, positions, read.clone() if read is hidden else read))
        self.num_recent += longest

    def _keep_recent(self) -> None:
        """Write what was read of the last steps where `kept` has it; no two have the same place."""
        if self.recent:
            slots, positions, read = map(torch.cat, zip(*self.recent, strict=True))
            self.kept[slots, positions % MOST_BEHIND] = read
            self.recent.clear()
            self.num_recent = 0

    def _go_along(self, batch: InputBatch, read: Tensor, num_kept: Tensor | None) -> None:
        """Run the head over a step of which it follows every row, and was behind in none."""
        (slots, positions), attention = batch.tokens[:2], batch.attention
        wanted, last = batch.drafting_rows, batch.ends(num_kept)
        skipped, self.num_skipped = self.skipped[batch.host_slots], None
        if skipped.any():
            of_tokens = upload(skipped.repeat(batch.query_lens), read.device)
            attention = decode_attention(self.states, slots, positions - of_tokens)
            self.num_skipped = upload(skipped[wanted], read.device)
        run = self.passes if self._is_decode(batch) else self._follow
        made = run(self.states.read(slots, positions + 1), positions, attention, read)
        if len(wanted) < len(last):
            last = last[upload(wanted, read.device)]
        self.features = made.index_select(0, last)
        self.limits = batch.max_new_drafts[wanted]

    def _is_decode(self, batch: InputBatch) -> bool:
        """Whether `passes` can run the head over its tokens."""
        return batch.is_decode and batch.tokens.shape[1] <= self.max_num_rows

    def _catch_up(
        self, batch: InputBatch, read: Tensor, rows: np.ndarray, wants: np.ndarray
    ) -> None:
        """Run the head over what rows of a step have not followed yet, with drafts of the step that
        were not kept.

        Args:
            batch: the step.
            read: of its tokens, [num_tokens, num_read].
            rows: [n] int64.
            wants: [n] bool: which of them draft; their features are kept for `propose`.
        """
        host_slots = batch.host_slots[rows]
        behind = self.behind[host_slots]
        behind[behind > MOST_BEHIND] = 0  # what is kept are the first ones, and others are missing
        self.skipped[host_slots] += self.behind[host_slots] - behind
        lens = behind + batch.query_lens[rows]
        ends = np.cumsum(lens)
        parts = (
            np.repeat(np.arange(len(rows)), lens),
            np.arange(ends[-1]) - np.repeat(ends - lens, lens),
            (np.cumsum(batch.query_lens) - batch.query_lens)[rows], ends - lens, ends - 1,
            np.flatnonzero(wants), behind, self.skipped[host_slots],
        )  # fmt: skip
        packed = upload(np.concatenate(parts), read.device)
        row, offsets, step_firsts, firsts, lasts, drafting, behind_d, skipped = packed.split(
            [len(part) for part in parts]
        )
        row_slots, computed = batch.tokens[:, step_firsts]  # [n] each
        start = computed - behind_d
        slots, positions = row_slots[row], start[row] + offsets
        in_step = offsets - behind_d[row]
        features = read[step_firsts[row] + in_step.clamp(min=0)]
        if behind.any():
            kept = self.kept[slots, positions % MOST_BEHIND]
            features = torch.where(in_step.unsqueeze(1) < 0, kept, features)
        places, bounds = positions - skipped[row], batch.seq_lens[rows]
        if places.device.type == "cpu":
            bounds = places.numpy()[ends - 1] + 1
        next_ids = self.states.read(slots, positions + 1)
        is_program = self.passes != self._follow
        if is_program and len(places) <= self.max_num_rows and lens.max() <= MOST_IN_ROWS:
            attention, run = decode_attention(self.states, slots, places), self.passes
        else:
            attention = AttentionRows(lens, bounds, lasts).gather(self.states, slots, places)
            run = self._follow
        made = run(next_ids, positions, attention, features)
        num_right = self.states.num_computed[row_slots] - start
        self.features = made[(firsts + num_right - 1)[drafting]]
        self.num_skipped = skipped[drafting]
        self.limits = batch.max_new_drafts[rows][wants]

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> Tensor:
        """A chain of likeliest tokens, up to `max_model_len`."""
        newest = self.states.num_computed.index_select(0, slots)
        depths = self.after[: num_drafts - 1].unsqueeze(1)
        # A row has blocks for no more; positions from the newest token's on are computed again.
        if self.limits.min() < num_drafts - 1:
            depths = torch.minimum(depths, upload(self.limits, slots.device))
        positions = newest - 1 + depths  # [num_drafts - 1, n]
        columns = positions if self.num_skipped is None else positions - self.num_skipped
        drafts = self.chain(self.features, slots, positions, columns)
        most = self.config.max_model_len or self.states.max_model_len
        if max_len + num_drafts <= most:
            return drafts
        return drafts.masked_fill_(self.after[:num_drafts] >= most - newest.unsqueeze(1), -1)

    def top(self, features: Tensor) -> Tensor:
        """See `Drafter`."""
        return self.head.top(features)

    def advance(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, features: Tensor
    ) -> Tensor:
        """See `Drafter`; here the positions are those of the features."""
        ctx = ForwardContext(self.backend, attention, self.kv_caches)
        return self.head(token_ids, features, positions, ctx)

    def _follow(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, read: Tensor
    ) -> Tensor:
        return self.advance(token_ids, positions, attention, self.head.features(read))


Proposer = EagleProposer  # the name that every file of this package has
