"""RoBERTa (https://arxiv.org/abs/1907.11692): BERT whose positions begin after that of padding."""

from __future__ import annotations

from torch import Tensor, nn

from servd.checkpoint.hf import ModelSpec
from servd.checkpoint.pooling import first_position, num_labels
from servd.worker.device.parallel import Parallel
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.models.bert import BertModel


class RobertaModel(BertModel):
    @staticmethod
    def first_position(spec: ModelSpec) -> int:
        """After that of padding."""
        return first_position(spec)


class RobertaForMaskedLM(RobertaModel):
    """Embeds without its head."""


class RobertaForSequenceClassification(RobertaModel):
    """A head of two layers on the first token."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        size, labels = spec.hidden_size, num_labels(spec.config)
        self.classifier = nn.ModuleDict({
            "dense": ReplicatedLinear(size, size, parallel, bias=True),
            "out_proj": ReplicatedLinear(size, labels, parallel, bias=True),
        })  # fmt: skip

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """First tokens' [n, hidden] -> [n, num_labels]."""
        return self.classifier["out_proj"](self.classifier["dense"](hidden).tanh())
