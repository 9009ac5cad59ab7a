"""llama.cpp's samplers restated for one row in float64 numpy, from their papers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from servd.messages.params import SamplingParams

Row = NDArray[np.float64]  # logits; -inf: removed


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def surprise_of(probs: Row) -> Row:
    with np.errstate(divide="ignore"):
        return -np.log(probs)


def top_n_sigma(logits: Row, n: float) -> Row:
    """arXiv 2411.07641: logits within n standard deviations of the greatest."""
    finite = logits[np.isfinite(logits)]
    return np.where(logits >= logits.max() - n * finite.std(), logits, -np.inf)


def typical_p(logits: Row, share: float) -> Row:
    """arXiv 2202.00666: the smallest set of tokens nearest to the entropy with this probability."""
    probs = softmax(logits)
    surprise = surprise_of(probs)
    entropy = np.sum(probs[probs > 0] * surprise[probs > 0])
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(probs[order]), share, side="right")) + 1
    kept = np.full_like(logits, -np.inf)
    kept[order[:num_kept]] = logits[order[:num_kept]]
    return kept


def xtc(logits: Row, threshold: float) -> Row:
    """Exclude top choices: all tokens above the threshold but the least probable."""
    probs = softmax(logits)
    good = np.flatnonzero(probs >= threshold)
    if len(good) < 2:
        return logits
    lowest = probs[good].min()
    return np.where((probs >= threshold) & (probs > lowest), -np.inf, logits)


def dynamic_temperature(logits: Row, temperature: float, width: float, exponent: float) -> float:
    """The temperature by the share of the greatest entropy."""
    probs = softmax(logits)
    num_tokens = int(np.isfinite(logits).sum())
    if num_tokens == 1:
        return temperature
    probs = probs[probs > 0]
    share = np.sum(probs * surprise_of(probs)) / np.log(num_tokens)
    low = max(temperature - width, 0)
    return low + (temperature + width - low) * share**exponent


def mirostat(logits: Row, limit: float) -> Row:
    """arXiv 2007.14966, version 2: tokens whose surprise in bits is below the limit."""
    bits = surprise_of(softmax(logits)) / np.log(2)
    is_kept = bits <= limit
    is_kept[np.argmax(logits)] = True
    return np.where(is_kept, logits, -np.inf)


def dry_lengths(tokens: Sequence[int], breakers: set[int]) -> dict[int, int]:
    """For each next token: the longest repetition that it would prolong."""
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            if tokens[end - length] in breakers:
                break
            length += 1
        if length:
            longest[tokens[end + 1]] = max(longest.get(tokens[end + 1], 0), length)
    return longest


def dry(logits: Row, params: SamplingParams, tokens: Sequence[int]) -> Row:
    last_n = params.dry_penalty_last_n
    window = tokens if last_n < 0 else tokens[len(tokens) - min(last_n, len(tokens)) :]
    logits = logits.copy()
    for token, length in dry_lengths(window, {*params.dry_breaker_token_ids}).items():
        if length >= params.dry_allowed_length:
            exponent = length - params.dry_allowed_length
            logits[token] -= params.dry_multiplier * params.dry_base**exponent
    return logits


def in_order(logits: Row, params: SamplingParams, tokens: Sequence[int]) -> Row:
    """All of them in llama.cpp's order, with XTC at each step, then top-k and others. Returns the
    probabilities.
    """
    if params.dry_multiplier:
        logits = dry(logits, params, tokens)
    if params.top_n_sigma > 0:
        logits = top_n_sigma(logits, params.top_n_sigma)
    if params.top_k > 0:
        logits = np.where(logits >= np.sort(logits)[-params.top_k], logits, -np.inf)
    if params.typical_p < 1:
        logits = typical_p(logits, params.typical_p)
    if params.top_p < 1:
        probs = softmax(logits)
        descending = np.sort(probs)[::-1]
        last = int(np.searchsorted(np.cumsum(descending), params.top_p))
        logits = np.where(probs >= descending[last], logits, -np.inf)
    probs = softmax(logits)
    logits = np.where(probs >= params.min_p * probs.max(), logits, -np.inf)
    if params.xtc_probability:
        logits = xtc(logits, params.xtc_threshold)
    temperature = params.temperature
    if params.dynatemp_range:
        temperature = dynamic_temperature(
            logits, temperature, params.dynatemp_range, params.dynatemp_exponent
        )
    return softmax(logits / temperature)
