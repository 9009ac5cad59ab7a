"""The model whose tokens are drafted, by transformers."""

from __future__ import annotations

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
        # Of the norm before the output head, where it is named as in Llama.
        norm = getattr(model.base_model, "norm", None)
        self.last_norm: Tensor | None = None if norm is None else norm.weight
        self.aux_layers = aux_layers
        self.is_16_bit = dtype != torch.float32

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, length] -> features [rows, length, layers * hidden] and last hidden states
        [rows, length, hidden].
        """
        made = self.model.base_model(ids, output_hidden_states=True, use_cache=False)
        states = made.hidden_states
        features = [states[layer] for layer in self.aux_layers] or [states[0][..., :0]]
        return torch.cat(features, dim=-1), made.last_hidden_state

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
