"""Drafting ahead of the model: one file per method, with a class `Proposer`.

Drafts are in the rows of `RequestStates`, after the known tokens, until the next step computes and
verifies them (sample/verification.py). Drafts never change the output.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.base.sizes import format_bytes
from servd.checkpoint.hub import download_weights
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.speculative import SpeculativeConfig
from servd.messages.engine import ModelRunnerOutput, NewRequest
from servd.worker.attention import AttentionBackend, make_backend
from servd.worker.batch.draft_chain import Chain, Drafter
from servd.worker.batch.draft_tree import DraftTree, Path
from servd.worker.batch.input_batch import InputBatch
from servd.worker.batch.request_states import RequestStates
from servd.worker.device.device import defaults, upload
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import spec_of
from servd.worker.layers.weight import Loadable
from servd.worker.loading import model_loader
from servd.worker.loading.model_loader import Model

log = logging.getLogger("servd.worker")

Draft = TypeVar("Draft", bound=Loadable)


@dataclass(frozen=True, slots=True)
class Target:
    """The model for which a proposer drafts, on this rank."""

    config: Config  # resolved
    spec: ModelSpec
    model: Model
    states: RequestStates
    parallel: Parallel
    backend: AttentionBackend[Any]
    # Makes this device's fastest chain from a drafter, the maximum rows, and the maximum tokens
    # of the pass before.
    make_chain: Callable[[Drafter, int, int], Chain]

    def find_draft(self) -> str:
        model = self.config.model
        draft = model.speculative_config
        assert draft is not None and draft.model is not None
        return str(download_weights(draft.model, draft.revision, model.download_dir))

    def make_backend(self, draft: Loadable) -> AttentionBackend[Any]:
        """Return the backend for a draft's attention, with the target's block tables."""
        target_spec = self.backend.spec
        spec = spec_of(
            draft,
            block_size=target_spec.block_size,
            dtype=target_spec.dtype,
            kv_dtype=target_spec.kv_dtype,
            device=target_spec.device,
            # Only the device knows how many drafts were kept.
            exact_seq_lens=target_spec.device.type == "cpu",
        )
        return make_backend(self.config.parallel.attention_backend, spec)[1]

    def load(
        self, make: Callable[[], Draft], folder: str, rename: Callable[[str], str] = str
    ) -> Draft:
        spec = self.backend.spec
        speculative = self.config.model.speculative_config
        assert speculative is not None
        with defaults(spec.dtype, spec.device):
            draft = make()
        dtype = getattr(torch, self.config.model.dtype)
        widening = self.config.model.widen_weights
        make_quant_method = model_loader.quant_method_maker(
            dtype, speculative.quantization, folder, widening=widening
        )
        model_loader.load_weights(draft, folder, lambda _: None, make_quant_method, rename)
        return draft


class Proposer(ABC):
    """Drafts the tokens that may follow in a request. Never waits for the device.

    Args:
        config: the method's configuration.
        target: the model to draft for; its KV cache does not exist yet.
    """

    kv_caches: Sequence[Tensor] = ()  # the proposer's own, set by allocate_kv_cache
    is_reading = False  # whether it reads more of a pass than hidden states

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        self.config = config
        self.target = target
        self.states = target.states
        device = self.states.token_ids.device
        self.after = torch.arange(1, config.num_speculative_tokens + 1, device=device)

    def __str__(self) -> str:
        parts: list[Any] = [part for part in vars(self).values() if isinstance(part, nn.Module)]
        size = format_bytes(sum(map(model_loader.count_bytes, parts)))
        draft = f"{self.config.model or 'a part of the model'}, {size}" if parts else "no model"
        max_drafts = self.config.num_speculative_tokens
        return (
            f"drafts by {self.config.method} ({draft}), up to {max_drafts} in a step of a request"
        )

    def draft_tree(self, paths: Sequence[Path]) -> None:
        """Enable branching drafts: `propose` returns the token of each path.

        Raises ConfigError if drafts of this target cannot branch.
        """
        if not self.target.backend.supports_tails:
            raise ConfigError(
                "--speculative-config: this attention backend does not support draft trees; add "
                "--attention-backend triton, or lower num_speculative_tokens for a chain"
            )
        if self.config.acceptance_chances is not None:
            raise ConfigError(
                '--speculative-config: rejection_sample_method "synthetic" is for chains of '
                "drafts; lower num_speculative_tokens"
            )
        self.states.tree = DraftTree(paths, self.states.token_ids.device)

    def check_token_map(
        self, token_map: Tensor | None, draft_vocab_size: int, *, is_relative: bool = False
    ) -> None:
        """Check that a draft's vocabulary is part of the model's: a draft outside it would crash
        the engine. Raises ConfigError if it is not.

        Args:
            token_map: [draft_vocab] int64, loaded; None: the model's first token ids.
            draft_vocab_size: rows of the draft's output head.
            is_relative: the map has the model's token id minus the draft's.
        """
        if token_map is None:
            token_map = torch.arange(draft_vocab_size)
        elif token_map.is_meta:  # a dry run loads no numbers
            return
        elif is_relative:
            token_map = token_map + torch.arange(len(token_map), device=token_map.device)
        vocab_size = self.target.spec.vocab_size
        outside = token_map[(token_map < 0) | (token_map >= vocab_size)].tolist()
        if outside:
            raise ConfigError(
                f"--speculative-config: {self.config.model} drafts token {outside[0]}, but the "
                f"model has tokens 0 to {vocab_size - 1}; use a head of this model"
            )

    @property
    def bytes_per_block(self) -> int:
        """The bytes of the proposer's own cache per block of the target's KV cache."""
        return 0

    def allocate_kv_cache(self, num_blocks: int) -> None:  # noqa: B027 - few need it
        """Allocate the proposer's own cache, for the same blocks."""

    def add(self, request: NewRequest) -> None:  # noqa: B027 - few need it
        """Note that a request enters its slot."""

    def remove(self, slot: int) -> None:  # noqa: B027 - few need it
        """Note that the request leaves its slot."""

    def begin_step(self, batch: InputBatch) -> None:  # noqa: B027 - few need it
        """Note that a step is about to be computed."""

    def follow(  # noqa: B027 - few need it
        self, batch: InputBatch, hidden: Tensor, num_kept: Tensor | None
    ) -> None:
        """Note that a step was computed and its tokens are written.

        Args:
            batch: the batch of the step.
            hidden: [num_tokens, hidden], of all tokens, including prompts and rejected drafts.
            num_kept: see `SamplerOutput`.
        """

    @abstractmethod
    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> Tensor:
        """Return drafts for rows whose tokens are known up to the token just sampled. That token
        has index `states.num_computed` in its row and is not computed yet. The rows have blocks for
        the drafts.

        Args:
            slots: [n] int64.
            max_len: maximum tokens of a row.
            num_drafts: maximum for a row; a row may be given fewer of those that are found.

        Returns:
            token ids, int64 [n, num_drafts]; -1 after the last draft of a row.
        """

    def draft(
        self, batch: InputBatch, hidden: Tensor, num_kept: Tensor | None
    ) -> DraftTokenIds | None:
        """Return drafts for the rows of a step that need them, once its tokens are written."""
        self.follow(batch, hidden, num_kept)
        if batch.is_plain or not len(rows := batch.drafting_rows):
            return None
        states = self.states
        device = batch.tokens.device
        host_slots = batch.host_slots[rows]
        limits = batch.max_new_drafts[rows]
        slots = upload(host_slots, device)
        num_drafts = int(limits.max())
        token_ids = self.propose(slots, int(batch.seq_lens.max()) + 1, num_drafts)
        if states.tree is not None and not (is_tree := states.is_tree[host_slots]).all():
            # Rows that may not have a tree get the tree's likeliest drafts.
            chain_rows = upload(np.flatnonzero(~is_tree), device)
            chain = [draft for draft in states.tree.chain if draft < num_drafts]
            token_ids[chain_rows, : len(chain)] = token_ids[chain_rows][:, chain]
            token_ids[chain_rows, len(chain) :] = -1
        if limits.min() < num_drafts:
            is_over = np.arange(num_drafts) >= limits[:, None]
            token_ids = token_ids.masked_fill(upload(is_over, device), -1)
        newest = states.num_computed.index_select(0, slots).unsqueeze(1)
        states.write(slots.unsqueeze(1), newest + self.after[:num_drafts], token_ids)
        return DraftTokenIds(rows, token_ids)


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """A StepPart: the drafts, which the engine needs for grammars."""

    rows: np.ndarray  # [n] indices in the step
    token_ids: Tensor  # [n, k] int64; -1: none

    def to_host(self) -> DraftTokenIds:
        return DraftTokenIds(self.rows, self.token_ids.to("cpu", non_blocking=True))

    def write(self, output: ModelRunnerOutput) -> None:
        for row, token_ids in zip(self.rows.tolist(), self.token_ids.tolist(), strict=True):
            output.draft_token_ids[row] = [token_id for token_id in token_ids if token_id >= 0]


def load(target: Target) -> Proposer | None:
    """Return the proposer of the configured method; None without a method."""
    config = target.config.model.speculative_config
    if config is None:
        return None
    proposer_class = plugins.load_class(__name__, config.method, Proposer)
    if not (isinstance(proposer_class, type) and issubclass(proposer_class, Proposer)):
        raise ConfigError(
            f"--speculative-config: method {config.method} is not a subclass of "
            "servd.worker.spec_decode.Proposer"
        )
    backend = target.backend
    if backend.spec.device.type == "cpu" and not backend.is_batch_invariant:
        log.warning(
            "speculative decoding may change outputs: torch's attention rounds differently "
            "from batch to batch. servd's kernels do not, but need --block-size (%d) and the "
            "head size (%d) to be multiples of 16, and no 8-bit KV cache",
            backend.spec.block_size,
            backend.spec.head_dim,
        )
    return proposer_class(config, target)
