"""Token embedding and output head, with the vocabulary split over the ranks."""

import torch
from torch import Tensor, nn

from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import MakeQuantMethod, Matrix
from servd.worker.layers.weight import Weight


class Embedding(nn.Module):
    """A table that every rank holds in full, e.g. learned positions."""

    def __init__(self, num_rows: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((num_rows, hidden_size), parallel)
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, index: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        return self.ops.embed(index, self.weight)


def padded_rows(vocab_size: int, device: torch.device) -> int:
    """Return the rows of an output head. On CUDA, they are padded to a multiple of 64, because fast
    matrix products need rows of logits aligned to 16 bytes, unlike GPT-2's 50,257.
    """
    return -(-vocab_size // 64) * 64 if device.type == "cuda" else vocab_size


class EmbeddingTable(Matrix):
    def process_weights(self, make: MakeQuantMethod) -> None:
        super().process_weights(make._replace(dense=make.table or make.dense))


class VocabEmbedding(nn.Module):
    """The vocabulary's rows, as embedding, as output head, or as both (tied)."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = parallel
        self.weight = EmbeddingTable((vocab_size, hidden_size), parallel, shard_dim=0)
        rows = padded_rows(vocab_size, torch.get_default_device())
        if parallel.size == 1 and rows > vocab_size:
            self.weight.data = torch.zeros(rows, hidden_size)
        self.factor = 1.0  # factor on embeddings
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, input_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        rows = self._rows(input_ids)
        return rows if self.factor == 1.0 else self.ops.scale(rows, self.factor)

    def _rows(self, input_ids: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return self.weight.rows(input_ids)
        local_size = self.parallel.share(self.vocab_size)
        local = input_ids - self.parallel.rank * local_size
        foreign = (local < 0) | (local >= local_size)
        rows = self.weight.rows(local.masked_fill(foreign, 0))
        return self.parallel.all_reduce(rows.masked_fill(foreign[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] for hidden states [n, hidden]; the same on every rank."""
        logits = self.parallel.all_gather(self.weight.product(hidden))
        return logits[:, : self.vocab_size]
