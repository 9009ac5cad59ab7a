"""XLM-RoBERTa (https://arxiv.org/abs/1911.02116): RoBERTa with a vocabulary of 100 languages."""

from servd.worker.models.roberta import (
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)


class XLMRobertaModel(RobertaModel):
    """See RobertaModel."""


class XLMRobertaForMaskedLM(RobertaForMaskedLM):
    """Embeds without its head."""


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """See RobertaForSequenceClassification."""
