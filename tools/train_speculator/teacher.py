"""The model whose tokens are drafted, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class Teacher:
    """Hidden states of a model, without gradients, and its embedding and output head.

    Args:
        folder: of the model.
        dtype: of its weights here.
        device: to run on.
        aux_layers: whose inputs are features.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, aux_layers: list[int]
    ) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        self.embedding: Tensor = model.get_input_embeddings().weight  # [vocab, hidden]
        self.output_head: nn.Linear = model.get_output_embeddings()
        # Weight of the norm before the output head, where it is named as in Llama.
        norm = getattr(model.base_model, "norm", None)
        self.last_norm: Tensor | None = None if norm is None else norm.weight
        self.aux_layers = aux_layers
        self.dtype = dtype
        self.device = device

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, length] -> features [rows, length, layers * hidden] and last hidden states
        [rows, length, hidden].
        """
        made = self.model.base_model(ids, output_hidden_states=True, use_cache=False)
        states = made.hidden_states
        features = [states[layer] for layer in self.aux_layers] or [states[0][..., :0]]
        return torch.cat(features, dim=-1), made.last_hidden_state

    @property
    def width(self) -> int:
        """Numbers of a token: features and last hidden state."""
        return (len(self.aux_layers) + 1) * self.embedding.shape[1]

    def embed(self, ids: Tensor) -> Tensor:
        """As the embedding has them, unscaled."""
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """[n, hidden] -> [n, vocab], or of some tokens alone [n, len(token_ids)]."""
        head = self.output_head
        if token_ids is None:
            return head(hidden)
        bias = None if head.bias is None else head.bias[token_ids]
        return F.linear(hidden, head.weight[token_ids], bias)

    def last_layer(self) -> dict[str, Tensor]:
        """Weights of the last layer by their names in it."""
        lists = (part for part in self.model.modules() if isinstance(part, nn.ModuleList))
        return dict(next(lists)[-1].named_parameters())


class StateCache:
    """What a teacher says of examples, kept in a file, so that later passes need not compute it.

    Args:
        teacher: the model.
        path: of the file, which is mapped to memory; what is in it already holds.
        lengths: tokens of each example.
    """

    def __init__(self, teacher: Teacher, path: Path, lengths: Sequence[int]) -> None:
        self.teacher = teacher
        self.starts = [0, *accumulate(lengths)]
        size = self.num_bytes(teacher, lengths) // teacher.dtype.itemsize
        states = torch.from_file(str(path), shared=True, size=size, dtype=teacher.dtype)
        self.states = states.view(-1, teacher.width)

    @staticmethod
    def num_bytes(teacher: Teacher, lengths: Sequence[int]) -> int:
        """Bytes of the file."""
        return sum(lengths) * teacher.width * teacher.dtype.itemsize

    def __call__(self, ids: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As of the teacher, for ids [rows, length] of the examples with these numbers; zeros
        behind their ends.
        """
        rows = [self.states[self.starts[i] : self.starts[i + 1]] for i in numbers]
        if not all(row[0].any() for row in rows):
            for row, made in zip(rows, torch.cat(self.teacher(ids), dim=-1), strict=True):
                row[1:] = made[1 : len(row)]
                row[0] = made[0]  # at last: an example is there whole or not at all
        states = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.teacher.device)
        hidden_size = self.teacher.embedding.shape[1]
        return states[..., :-hidden_size], states[..., -hidden_size:]
