"""The sampler's operations of servd/worker/ops/cpu/sampling.cpp, for CPUs."""

import torch
from torch import Tensor

from servd.worker.ops.native import call
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.ops.reference import add_biases


def edit_logits(logits: Tensor, changes: LogitEdits) -> Tensor:
    if logits.dtype != torch.float32:  # logits without edits
        logits = logits.float()
    if changes.biased is not None:
        add_biases(logits, changes.biased)
    # Integers in float tensors, to be in a graph's buffers.
    best = torch.empty(2 * len(logits)).view(torch.int64)
    masked = (None, 0, 0)
    if changes.bitmasks is not None:
        words = changes.bitmasks.expand()
        masked = (words, *words.shape)
    penalized = changes.penalized
    penalties = (None, 0, None, None)
    if penalized is not None:
        counts = penalized.counts
        penalties = (penalized.slot_of_each(len(logits)), len(counts), counts, penalized.factors)
    call("edit_logits", logits, logits.stride(0), *masked, *penalties, *logits.shape, best)
    return best


def choose(logits: Tensor, slots: Tensor, columns: Tensor, token_ids: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        logits = logits.float()
    chosen = torch.empty(len(logits), dtype=torch.int64)
    assert slots.is_contiguous() and columns.is_contiguous() and token_ids.is_contiguous()
    rows = logits, logits.stride(0), *logits.shape
    call("choose", *rows, slots, columns, token_ids, *token_ids.shape, chosen)
    return chosen


def to_weights(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    weights = torch.empty(logits.shape)
    per_row = _contiguous(peaks, temperatures)
    call("to_weights", logits, logits.stride(0), *per_row, *logits.shape, weights)
    return weights


def filter_top_k_top_p(weights: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    limits = torch.empty(len(weights))
    call("filter_top_k_top_p", *_contiguous(weights, lowest, top_k, top_p), *weights.shape, limits)
    return limits


def draw(weights: Tensor, lowest: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    token_ids = torch.empty(len(weights), dtype=torch.int64)
    call("draw", *_contiguous(weights, lowest, seeds, positions), *weights.shape, token_ids)
    return token_ids


def score(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    log_totals = torch.empty(len(logits))
    ranks = torch.empty(len(logits), dtype=torch.int64)
    at = token_ids.contiguous()
    call("score", logits, logits.stride(0), at, *logits.shape, log_totals, ranks)
    return log_totals, ranks


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]
