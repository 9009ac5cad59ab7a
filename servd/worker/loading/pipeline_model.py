"""Cuts a model to one pipeline stage: layers of other stages are neither built nor loaded.

A stage maps a residual stream, [num_tokens, hidden], to a new stream. The embedding is replaced by
the input from the previous stage, and the final norm by the sum that the norm would normalize.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import Attention
from servd.worker.layers.embedding import Embedding, VocabEmbedding
from servd.worker.layers.norm import LayerNorm, RMSNorm
from servd.worker.layers.quantized import LAYER
from servd.worker.layers.state import State


class IntermediateTensors(nn.Module):
    """A replacement for the embedding: the previous stage's output, at a fixed address."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.stream = torch.empty(0, hidden_size)

    def make_room(self, max_num_tokens: int) -> None:
        self.stream = self.stream.new_zeros(max_num_tokens, self.stream.shape[1])

    def forward(self, input_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        return self.stream[: len(input_ids)]


class Nothing(nn.Module):
    """A replacement for terms added to the embedding, like positions: the input has them."""

    def forward(self, _: Tensor) -> None:
        return


class Sum(nn.Module):
    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream [num_tokens, hidden] for the next stage."""
        stream = residual.add(x)
        return stream, stream


class MissingHead(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        return hidden.new_zeros(len(hidden), self.vocab_size)


def cut(model: Any, parallel: Parallel, num_layers: int) -> None:
    """Reduce a model to this stage, before its weights are loaded. Raises UnsupportedModel if the
    model does not build its layers with `Parallel.layers`.
    """
    layer_range = parallel.own_layers(num_layers)
    layers: dict[int, Attention | None] = {}  # those in which tokens interact
    for name, module in model.named_modules():
        if isinstance(module, Attention | State) and (layer := LAYER.search(name)) is not None:
            layers[int(layer[1])] = module if isinstance(module, Attention) else None
    if [*layers] != [*layer_range]:
        raise UnsupportedModel(
            f"{type(model).__name__} has no stages: leave --pipeline-parallel-size at 1"
        )
    for number, attention in enumerate(filter(None, layers.values())):
        attention.layer = number  # index of its KV cache
    whole = _names(model)
    embedding = _replace_ends(model, parallel)
    here = _names(model)
    elsewhere = whole - here
    # A head tied to a replaced embedding is loaded under its own name.
    head = "lm_head.weight" if "lm_head.weight" in here - whole else ""
    convert = getattr(model, "convert", iter)

    def of_stage(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in convert(tensors):
            full = name if name.startswith(model.base_prefix) else model.base_prefix + name
            if head and full == embedding:
                yield head, tensor
            elif (layer := LAYER.search(name)) is not None:
                if int(layer[1]) in layer_range:
                    yield name, tensor
            elif name != head and not elsewhere & {name, full}:
                yield name, tensor

    model.convert = of_stage


def _replace_ends(model: Any, parallel: Parallel) -> str:
    """Replace the embedding, final norm and head of other stages; return the embedding's name."""
    base = model.get_submodule(model.base_prefix[:-1])
    embedding = ""
    for name, part in list(base.named_children()):
        is_tokens = isinstance(part, VocabEmbedding)
        if is_tokens:
            embedding = f"{model.base_prefix}{name}.weight"
        if isinstance(part, VocabEmbedding | Embedding) and parallel.stage > 0:
            setattr(
                base, name, IntermediateTensors(part.weight.shape[1]) if is_tokens else Nothing()
            )
        elif isinstance(part, RMSNorm | LayerNorm) and not parallel.is_last_stage:
            setattr(base, name, Sum())
    if not parallel.is_last_stage:
        model.lm_head = MissingHead(model.lm_head.vocab_size)
    return embedding


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}
