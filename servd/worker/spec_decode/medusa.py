"""medusa: heads on the last hidden state, each of which predicts one token further ahead
(https://arxiv.org/abs/2401.10774).

The draft is the likeliest token of each head in sequence, as in vLLM, or a tree of the likeliest
tokens.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from servd.base.errors import ConfigError
from servd.config.speculative import MOST_DRAFTS, SpeculativeConfig
from servd.worker.batch.draft_tree import Path
from servd.worker.batch.input_batch import InputBatch
from servd.worker.device.device import upload
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.weight import Weight
from servd.worker.loading.model_loader import tensor_shapes
from servd.worker.sample import ops
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.spec_decode import Proposer, Target

# Names in vLLM's layout and in https://github.com/FasterDecoding/Medusa -> names here.
NAMES = (
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\."), r"layers.\2.head\1."),
    (re.compile(r"(\d+)\.(\d+)\.linear\."), r"layers.\2.head\1."),
    (re.compile(r"lm_heads\.(\d+)\."), r"lm_heads.\1."),
    (re.compile(r"lm_head\."), r"lm_heads.0."),
    (re.compile(r"(\d+)\.\d+\."), r"lm_heads.\1."),
)


def rename(name: str) -> str:
    name = name.removeprefix("medusa_heads.")
    for pattern, replacement in NAMES:
        if match := pattern.match(name):
            return match.expand(replacement) + name[match.end() :]
    return name


def best_paths(num_drafts: int, num_heads: int) -> list[Path]:
    """Return the paths most worth drafting, if heads are about as accurate as the paper's. For
    fewer drafts, use the first paths.
    """
    paths: list[Path] = []
    candidates: list[tuple[float, Path]] = [(-1.0, (0,))]
    while len(paths) < num_drafts:
        chance, path = heappop(candidates)
        paths.append(path)
        rank = path[-1]
        heappush(candidates, (chance * ((rank + 1) / (rank + 2)) ** 2, (*path[:-1], rank + 1)))
        if len(path) < num_heads:
            heappush(candidates, (chance * 0.6, (*path, 0)))
    return paths


class ResidualLayer(nn.Module):
    """Computes `x + silu(W x)` of all heads in one product: for a small model, computing a head
    takes less time than calling it.
    """

    def __init__(self, num_heads: int, size: int, parallel: Parallel, *, bias: bool) -> None:
        super().__init__()
        parts = [size] * num_heads
        self.weight = Matrix((num_heads * size, size), parallel, parts=parts)
        self.bias = Weight((num_heads * size,), parallel, parts=parts) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return states [n, num_heads, hidden]; x may be [n, 1, hidden], equal for all heads."""
        n, num_inputs, size = x.shape
        made = self.weight.product(x.flatten(0, 1), self.bias).view(n, num_inputs, -1, size)
        # Every input was multiplied with every head: reading the weights takes the time.
        made = made[:, 0] if num_inputs == 1 else made.diagonal(dim1=1, dim2=2).mT
        return F.silu(made, inplace=True).add_(x)


class MedusaHeads(nn.Module):
    """The Medusa heads, with an output head for each, one for all, or the target's."""

    packed: ClassVar[dict[str, tuple[str, int]]] = {
        f"head{head}": ("heads", head) for head in range(MOST_DRAFTS)
    }
    ignored: ClassVar[tuple[str, ...]] = ()
    base_prefix: ClassVar[str] = ""

    def __init__(self, shapes: Mapping[str, torch.Size], target: Target) -> None:
        super().__init__()
        size = target.spec.hidden_size
        parallel = target.parallel
        names = [name.split(".") for name in shapes]
        parts = {(int(name[1]), int(name[2][4:])) for name in names if name[0] == "layers"}
        num_layers, self.num_heads = (1 + max(column) for column in zip(*parts, strict=True))
        bias = "layers.0.head0.bias" in shapes
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            layer = ResidualLayer(self.num_heads, size, parallel, bias=bias)
            self.layers.append(nn.Sequential(OrderedDict(heads=layer)))
        of_heads = [shape for name, shape in shapes.items() if name.startswith("lm_heads.")]
        lm_heads = [VocabEmbedding(shape[0], size, parallel) for shape in of_heads]
        self.lm_heads = nn.ModuleList(lm_heads)
        self.compute_logits = [lm_head.logits for lm_head in lm_heads]
        self.compute_logits = self.compute_logits or [target.model.compute_logits]
        self.ops = ops.for_device(target.backend.spec.device)
        self.token_map: Weight | None = None
        if "token_map" in shapes:
            self.token_map = Weight(shapes["token_map"], parallel)
            self.token_map.data = torch.zeros(shapes["token_map"], dtype=torch.int64)

    def forward(self, hidden: Tensor, num_heads: int, width: int = 1) -> Tensor:
        """Return the likeliest tokens of each head [n, num_heads, width], for [n, hidden]."""
        x = hidden.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        x = x[:, :num_heads]
        if len(self.compute_logits) == 1:
            top = self.likeliest(self.compute_logits[0](x.flatten(0, 1)), width)
        else:
            pairs = zip(self.compute_logits, x.unbind(1), strict=False)
            parts = [self.likeliest(logits(of_head), width) for logits, of_head in pairs]
            top = torch.stack(parts, dim=1)
        top = top.view(-1, num_heads, width)
        return top if self.token_map is None else self.token_map[top]

    def likeliest(self, logits: Tensor, width: int) -> Tensor:  # [n, vocab] -> token ids [n, width]
        if width > 1:
            return logits.topk(width).indices
        return self.ops.edit_logits(logits, LogitEdits()).unsqueeze(1)


class MedusaProposer(Proposer):
    """Reads the hidden state of each row's last token. Keeps nothing between steps."""

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        folder = target.find_draft()
        shapes = {rename(name): shape for name, shape in tensor_shapes(folder).items()}
        size = target.spec.hidden_size
        first = shapes.get("layers.0.head0.weight")
        if first != (size, size):
            raise ConfigError(
                f"--speculative-config: {config.model} has no Medusa heads for the model's "
                f"hidden size {size}; use heads of this model"
            )
        self.heads = target.load(lambda: MedusaHeads(shapes, target), folder, rename)
        vocab_sizes = [shape[0] for name, shape in shapes.items() if name.startswith("lm_heads.")]
        self.check_token_map(self.heads.token_map, max(vocab_sizes, default=0))
        num_heads = self.heads.num_heads
        num_drafts = config.num_speculative_tokens
        if num_drafts > num_heads:
            self.draft_tree(best_paths(num_drafts, num_heads))

    def follow(self, batch: InputBatch, hidden: Tensor, num_kept: Tensor | None) -> None:
        """Keep the hidden states [n, hidden] of the rows that need drafts."""
        drafting_rows = batch.drafting_rows
        if not len(drafting_rows):
            return
        last = batch.ends(num_kept)
        if len(drafting_rows) < len(last):
            last = last.index_select(0, upload(drafting_rows, hidden.device))
        self.hidden = hidden.index_select(0, last)

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> Tensor:
        """Return drafts. The first head's token follows the token just sampled."""
        if (tree := self.states.tree) is None:
            return self.heads(self.hidden, num_drafts)[..., 0]
        heads = tree.heads[:num_drafts]
        ranks = tree.ranks[:num_drafts]
        return self.heads(self.hidden, max(heads) + 1, max(ranks) + 1)[:, heads, ranks]
