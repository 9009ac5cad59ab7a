"""The sampler's operations of servd/worker/ops/cpu/sampling.cpp, for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.ops.native import library
from servd.worker.sample.ops.reference import add_biases
from servd.worker.sample.ops.reference import verify as verify
from servd.worker.sample.shift import Biased, Penalized


def shift(
    logits: Tensor,
    biased: Biased | None = None,
    bitmask: Tensor | None = None,
    penalized: Penalized | None = None,
) -> Tensor:
    """See `SamplingOps.shift`."""
    if biased is not None:
        add_biases(logits, biased)
    best = torch.empty(len(logits), dtype=torch.int64)
    slots = counts = factors = None
    if penalized is not None:
        slots, counts, factors = (
            penalized.slot_of_each(len(logits)),
            penalized.counts,
            penalized.factors,
        )
    num_words = 0 if bitmask is None else bitmask.shape[1]
    _call(
        "servd_shift",
        *_rows(logits),
        bitmask,
        num_words,
        slots,
        counts,
        factors,
        *logits.shape,
        best,
    )
    return best


def to_weights(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """See `SamplingOps.to_weights`."""
    weights = torch.empty(logits.shape)
    _call("servd_to_weights", *_rows(logits), peaks, temperatures, *logits.shape, weights)
    return weights


def narrow(weights: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """See `SamplingOps.narrow`."""
    limits = torch.empty(len(weights))
    _call("servd_narrow", weights, lowest, top_k, top_p, *weights.shape, limits)
    return limits


def draw(weights: Tensor, lowest: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `SamplingOps.draw`."""
    token_ids = torch.empty(len(weights), dtype=torch.int64)
    _call("servd_draw", weights, lowest, seeds, positions, *weights.shape, token_ids)
    return token_ids


def score(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See `SamplingOps.score`."""
    log_totals, ranks = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    _call("servd_score", *_rows(logits), token_ids, *logits.shape, log_totals, ranks)
    return log_totals, ranks


def _rows(logits: Tensor) -> tuple[int, int]:
    """Address and distance of rows that need not follow on one another."""
    return logits.data_ptr(), logits.stride(0)


def _call(function: str, *arguments: Tensor | int | None) -> None:
    lib = library()
    assert lib is not None
    # Copies of what is not contiguous must live until the call is over.
    kept = [
        argument.contiguous() if isinstance(argument, Tensor) else argument
        for argument in arguments
    ]
    getattr(lib, function)(
        *[each.data_ptr() if isinstance(each, Tensor) else each for each in kept]
    )
