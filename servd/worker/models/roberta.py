"""RoBERTa (https://arxiv.org/abs/1907.11692): BERT with positions after the padding id."""

from torch import Tensor, nn

from servd.worker.device.parallel import Parallel
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.models.bert import BertForSequenceClassification, BertModel

RobertaModel = BertModel  # finds by the model_type where positions begin
RobertaForMaskedLM = BertModel  # embeds without its head


class RobertaForSequenceClassification(BertForSequenceClassification):
    """An encoder, with a head of two layers on the first token."""

    ignored = BertModel.ignored

    def make_head(self, size: int, num_labels: int, parallel: Parallel) -> None:
        self.classifier = nn.ModuleDict(
            {
                "dense": ReplicatedLinear(size, size, parallel, bias=True),
                "out_proj": ReplicatedLinear(size, num_labels, parallel, bias=True),
            }
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, num_labels] for the hidden states [n, hidden] of first tokens."""
        return self.classifier["out_proj"](self.classifier["dense"](hidden).tanh())
