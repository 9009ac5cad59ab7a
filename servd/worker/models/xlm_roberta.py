"""XLM-RoBERTa (https://arxiv.org/abs/1911.02116): RoBERTa with a vocabulary of 100 languages."""

from servd.worker.models.roberta import RobertaForSequenceClassification, RobertaModel

XLMRobertaModel = RobertaModel
XLMRobertaForMaskedLM = RobertaModel  # embeds without its head
XLMRobertaForSequenceClassification = RobertaForSequenceClassification
