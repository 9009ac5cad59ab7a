"""medusa: heads on the last hidden state, each of which guesses one token further ahead
(https://arxiv.org/abs/2401.10774).

The draft is the likeliest token of each head, one after another, as in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from servd.errors import ConfigError
from servd.speculative import SpeculativeConfig
from servd.worker.input_batch import InputBatch
from servd.worker.layers.activation import Activation
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.layers.weight import Weight
from servd.worker.model_loader import tensor_shapes
from servd.worker.parallel import Parallel
from servd.worker.spec_decode import Proposer, Target, last_kept

# Names of vLLM's layout and of https://github.com/FasterDecoding/Medusa, and the names here.
NAMES = (
    (re.compile(r"blocks\.(\d+)\.layers\."), r"heads.\1.layers."),
    (re.compile(r"(\d+)\.(\d+)\.linear\."), r"heads.\1.layers.\2."),
    (re.compile(r"lm_heads\.(\d+)\."), r"lm_heads.\1."),
    (re.compile(r"lm_head\."), r"lm_heads.0."),
    (re.compile(r"(\d+)\.\d+\."), r"lm_heads.\1."),
)


def rename(name: str) -> str:
    """The name here of a checkpoint's tensor."""
    name = name.removeprefix("medusa_heads.")
    for pattern, known in NAMES:
        if found := pattern.match(name):
            return found.expand(known) + name[found.end() :]
    return name


class MedusaHead(nn.Module):
    """`x + silu(W x)`, some times."""

    def __init__(self, size: int, num_layers: int, parallel: Parallel, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ReplicatedLinear(size, size, parallel, bias=bias) for _ in range(num_layers)
        )
        self.act = Activation("silu")

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        for layer in self.layers:
            x = x + self.act(layer(x))
        return x


class MedusaHeads(nn.Module):
    """All heads, with an output head for each, one for all, or the target's."""

    packed: ClassVar[dict[str, tuple[str, int]]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    base_prefix: ClassVar[str] = ""

    def __init__(self, shapes: Mapping[str, torch.Size], target: Target) -> None:
        super().__init__()
        size, parallel = target.spec.hidden_size, target.parallel
        names = [name.split(".") for name in shapes]
        layers = {(int(name[1]), int(name[3])) for name in names if name[0] == "heads"}
        num_heads, num_layers = (1 + max(column) for column in zip(*layers, strict=True))
        bias = "heads.0.layers.0.bias" in shapes
        self.heads = nn.ModuleList(
            MedusaHead(size, num_layers, parallel, bias=bias) for _ in range(num_heads)
        )
        lm_heads = [
            VocabEmbedding(shape[0], size, parallel)
            for name, shape in shapes.items()
            if name.startswith("lm_heads.")
        ]
        self.lm_heads = nn.ModuleList(lm_heads)
        each = [lm_head.logits for lm_head in lm_heads] or [target.model.compute_logits]
        self.compute_logits = each if len(each) > 1 else each * num_heads
        self.token_map: Weight | None = None
        if "token_map" in shapes:
            self.token_map = Weight(shapes["token_map"], parallel)
            self.token_map.data = torch.zeros(shapes["token_map"], dtype=torch.int64)

    def forward(self, hidden: Tensor, num_heads: int) -> Tensor:
        """[n, hidden] -> the likeliest token of each head [n, num_heads]."""
        pairs = zip(self.heads[:num_heads], self.compute_logits[:num_heads], strict=True)
        top = torch.stack([logits(head(hidden)).argmax(-1) for head, logits in pairs], dim=1)
        return top if self.token_map is None else self.token_map[top]


class MedusaProposer(Proposer):
    """Keeps the hidden state of the last token of every slot."""

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        folder = target.find_draft()
        shapes = {rename(name): shape for name, shape in tensor_shapes(folder).items()}
        size, first = target.spec.hidden_size, shapes.get("heads.0.layers.0.weight")
        if first != (size, size):
            raise ConfigError(
                f"--speculative-config: {config.model} has no Medusa heads for hidden states of "
                f"{size} numbers, which the model has; name heads that were trained for it"
            )
        self.heads = target.load(lambda: MedusaHeads(shapes, target), folder, rename)
        if (num_heads := len(self.heads.heads)) < config.num_speculative_tokens:
            raise ConfigError(
                f"--speculative-config: {config.model} has {num_heads} Medusa heads: lower "
                f"num_speculative_tokens from {config.num_speculative_tokens} to {num_heads}"
            )
        spec = target.backend.spec
        self.hidden = torch.zeros(
            (target.states.max_num_seqs + 1, size), dtype=spec.dtype, device=spec.device
        )

    def follow(self, batch: InputBatch, hidden: Tensor) -> None:
        """Rows in the midst of their prompts are kept too: nothing is drafted for them."""
        slots, tokens = last_kept(batch)
        self.hidden[slots] = hidden[tokens]

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> tuple[Tensor, Tensor]:
        """The first head's token comes after the one just sampled."""
        drafts = self.heads(self.hidden[slots], num_drafts)
        return drafts, torch.full_like(slots, num_drafts)


Proposer = MedusaProposer  # the name that every file of this package has
