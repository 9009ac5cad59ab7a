"""Sampling restated for one row in float64 numpy; knows nothing of the sampler."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from servd.messages.params import SamplingParams


def processed_logits(
    logits, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int], eos, allowed=None
):
    """Logits after masks, bias and penalties. `allowed` is the grammar's set of tokens, if any."""
    logits = np.array(logits.tolist())
    forbidden = set()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(logits))) - set(params.allowed_token_ids)
    if allowed is not None:
        forbidden |= set(range(len(logits))) - set(allowed)
    if len(outputs) < params.min_tokens:
        forbidden |= set(eos) | set(params.stop_token_ids)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    logits[list(forbidden)] = -np.inf
    for token in set(prompt) | set(outputs):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(outputs).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def softmax(logits):
    """Probabilities in float64."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def narrow(probabilities, params: SamplingParams):
    """The distribution after min-p, top-k, top-p. Ties with the last token are kept."""
    p = np.where(probabilities >= params.min_p * probabilities.max(), probabilities, 0.0)
    if 0 < params.top_k < len(p):
        kth = np.sort(p)[-params.top_k]
        p = np.where(p >= kth, p, 0.0)
    p = p / p.sum()
    if params.top_p < 1:
        descending = np.sort(p)[::-1]
        num_kept = int(np.searchsorted(np.cumsum(descending), params.top_p, side="left")) + 1
        p = np.where(p >= descending[min(num_kept, len(p)) - 1], p, 0.0)
    return p / p.sum()


def distribution(logits, params: SamplingParams, prompt, outputs, eos, allowed=None):
    """The exact distribution of the next token."""
    logits = processed_logits(logits, params, prompt, outputs, eos, allowed)
    if params.is_greedy:
        return np.eye(len(logits))[int(np.argmax(logits))]
    return narrow(softmax(logits / params.temperature), params)
