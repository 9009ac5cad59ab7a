"""RoBERTa (https://arxiv.org/abs/1907.11692): BERT whose positions begin after that of padding."""

from torch import Tensor, nn

from servd.worker.device.parallel import Parallel
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.models.bert import BertForSequenceClassification, BertModel

RobertaModel = BertModel  # which finds by the model_type where positions begin
RobertaForMaskedLM = BertModel  # embeds without its head


class RobertaForSequenceClassification(BertForSequenceClassification):
    """An encoder, and a head of two layers on the first token."""

    ignored = BertModel.ignored

    def make_head(self, size: int, num_labels: int, parallel: Parallel) -> None:
        self.classifier = nn.ModuleDict(
            {
                "dense": ReplicatedLinear(size, size, parallel, bias=True),
                "out_proj": ReplicatedLinear(size, num_labels, parallel, bias=True),
            }
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """First tokens' [n, hidden] -> [n, num_labels]."""
        return self.classifier["out_proj"](self.classifier["dense"](hidden).tanh())
