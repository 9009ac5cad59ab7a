"""The sampler's operations in plain torch, for CPUs. They also run elsewhere, but then
`filter_top_k_top_p` waits for the device.

Each module of this package has these operations; tests/worker/sample/test_ops.py runs their
contract over all of them. Logits are float32 [n, vocab], each row contiguous. Weights are defined
in `fixed_point.py`, and contiguous. Everything after `to_weights` is integer arithmetic, with equal
results in all modules. Rows whose most probable token has no finite logit have undefined weights;
any valid token is drawn from them.
"""

import torch
from torch import Tensor

from servd.worker.sample.bitmask import apply_bitmask
from servd.worker.sample.fixed_point import WEIGHT_ONE
from servd.worker.sample.logit_edits import IN_PROMPT, Biased, LogitEdits, Penalized
from servd.worker.sample.uniform import uniform

MAX_SORTED = 256  # a top-k up to this size is found faster by torch.topk than by counting digits
# (shift, bits) of the 31 bits that a float32 without sign has.
DIGITS = ((20, 11), (10, 10), (0, 10))


def edit_logits(logits: Tensor, changes: LogitEdits) -> Tensor:
    """Add biases, forbid tokens by bitmasks, penalize; in place. Logits without biases and
    penalties may be of a narrower type; on a CPU those without masks.

    Returns:
        [n] int64, the most probable token of each row: the first one that is NaN, or else the
        first maximum.
    """
    if changes.biased is not None:
        add_biases(logits, changes.biased)
    if changes.bitmasks is not None:
        apply_bitmask(logits, changes.bitmasks.expand())
    if (penalized := changes.penalized) is not None:
        logits[penalized.rows] = _penalize(logits[penalized.rows], penalized)
    return logits.argmax(dim=-1)


def choose(logits: Tensor, slots: Tensor, columns: Tensor, token_ids: Tensor) -> Tensor:
    """Return each row's most probable token, like `edit_logits`, and write it to `token_ids`.

    Args:
        logits: [n, vocab], of any floating type.
        slots: [n] int64, rows of `token_ids`.
        columns: [n] int64.
        token_ids: int32 [slots, columns], each row contiguous.

    Returns:
        [n] int64: the token; or ~token, which is negative, if its logit is NaN or +inf.
    """
    best, chosen = logits.max(dim=-1)
    token_ids[slots, columns] = chosen.int()
    return torch.where(best < torch.inf, chosen, ~chosen)


def add_biases(logits: Tensor, biased: Biased) -> None:
    """Add biases to logits [n, vocab], in place."""
    num_entries = len(biased.token_ids)  # given, so that the host need not wait for the device
    rows = torch.arange(len(logits), device=logits.device)
    rows = rows.repeat_interleave(biased.starts.diff(), output_size=num_entries)
    logits[rows, biased.token_ids] += biased.biases


def _penalize(logits: Tensor, penalized: Penalized) -> Tensor:
    counts = penalized.counts[penalized.slots]  # a copy
    # Each [rows, 1].
    repetition, frequency, presence = penalized.factors[penalized.slots].unsqueeze(-1).unbind(1)
    factor = torch.where(logits > 0, 1 / repetition, repetition).masked_fill_(counts == 0, 1)
    num_outputs = counts.bitwise_and_(IN_PROMPT - 1)
    present = torch.where(num_outputs > 0, presence, 0.0)
    return (logits * factor).sub_(frequency * num_outputs).sub_(present)


def to_weights(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """Return weights [n, vocab] for logits, row maxima `peaks` [n], and `temperatures` [n]."""
    # At most 0 before the division, so no temperature can overflow it.
    return (logits - peaks.unsqueeze(1)).div_(temperatures.unsqueeze(1)).exp_().mul_(WEIGHT_ONE)


def filter_top_k_top_p(weights: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest weight that top-k and then top-p keep of the weights that are at
    least `lowest`.

    Tokens with the same weight as the last kept token are kept too, so the order of equal
    values has no effect.

    Args:
        weights: [n, vocab].
        lowest: [n] float32.
        top_k: [n] int64; 0 or less keeps all.
        top_p: [n] float64 in (0, 1].

    Returns:
        [n] float32, not below `lowest`.
    """
    weights = _at_least(weights, lowest)
    limits = lowest.clone()
    is_small = (top_k > 0) & (top_k <= MAX_SORTED)
    is_other = ~is_small & ((top_k > 0) | (top_p < 1))
    for chosen, method in ((is_small, _filter_by_sorting), (is_other, _filter_by_digits)):
        rows = chosen.nonzero().squeeze(1)
        if len(rows):
            part = weights if len(rows) == len(weights) else weights[rows]
            limits[rows] = method(part, top_k[rows], top_p[rows])
    return torch.maximum(limits, lowest)


def _filter_by_sorting(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    candidates = weights.topk(min(int(top_k.max()), weights.shape[1]), dim=-1).values
    ranks = torch.arange(candidates.shape[1], device=weights.device)
    candidates.masked_fill_(ranks >= top_k.unsqueeze(1), 0)
    masses = candidates.to(torch.int64)
    more_probable = masses.cumsum(dim=-1) - masses  # mass of the tokens before this one
    num_kept = (more_probable < (top_p * masses.sum(dim=-1)).unsqueeze(1)).sum(dim=-1, keepdim=True)
    # Only undefined rows keep no token.
    return candidates.gather(1, (num_kept - 1).clamp_(min=0)).squeeze(1)


def _filter_by_digits(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    masses = weights.to(torch.int64)
    totals = masses.sum(dim=-1)
    kth = torch.zeros_like(weights[:, 0])
    with_k = (top_k > 0).nonzero().squeeze(1)
    if len(with_k):
        part = weights[with_k]
        part_masses = masses[with_k]
        k = top_k[with_k]
        smallest = smallest_keeping(part, torch.ones_like(part_masses), k)
        is_above = part > smallest.unsqueeze(1)
        totals[with_k] = (
            part_masses.masked_fill(~is_above, 0).sum(-1) + (k - is_above.sum(-1)) * smallest.long()
        )
        kth[with_k] = smallest
    return torch.maximum(kth, smallest_keeping(weights, masses, top_p * totals))


def smallest_keeping(weights: Tensor, masses: Tensor, limits: Tensor) -> Tensor:
    """Return the smallest number such that the weights above it sum to less than a given mass.

    A radix search by the bits of the weights, which have the same order as the weights. Each digit
    is found by summing the masses of each of its values, among the weights that match the earlier
    digits. This is exact, and reads the row about once; a sort of a large vocabulary takes ten
    times as long. Returns [n] float32: a weight of the row, or 0. `weights`: [n, vocab] float32,
    not negative; `masses`: [n, vocab] int64; `limits`: [n] the mass of each row that may not be
    reached.
    """
    num_rows = len(weights)
    rows = torch.arange(num_rows, dtype=torch.int32, device=weights.device).unsqueeze(1)
    bits = weights.view(torch.int32)
    smallest = torch.zeros(num_rows, dtype=torch.int32, device=weights.device)
    mass_above = torch.zeros(num_rows, 1, dtype=torch.int64, device=weights.device)
    for position, width in DIGITS:
        digits = (bits >> position) & ((1 << width) - 1)
        sums = masses.new_zeros(num_rows << width)
        sums = sums.index_add_(0, ((rows << width) + digits).flatten(), masses.flatten()).view(
            num_rows, -1
        )
        # The mass of the weights whose digit is greater.
        above = mass_above + sums.flip(1).cumsum(1).flip(1) - sums
        digit = (above < limits.unsqueeze(1)).int().argmax(dim=1, keepdim=True)
        mass_above = above.gather(1, digit)
        digit = digit.squeeze(1).int()
        smallest += digit << position
        same = digits == digit[rows]
        at = same.nonzero(as_tuple=True)
        rows = rows.expand_as(same)[at]
        bits = bits[at]
        masses = masses[at]
    return smallest.view(torch.float32)


def draw(weights: Tensor, lowest: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return one token per row, [n] int64, drawn by inverse CDF over the weights that are at
    least `lowest` [n].

    The random number is `uniform(seeds, positions)`. A token of weight zero is never drawn.
    """
    cumulative = _at_least(weights, lowest).to(torch.int64).cumsum_(dim=-1)
    # < total: the largest u never rounds up to it.
    target = (uniform(seeds, positions) * cumulative[:, -1]).to(torch.int64)
    token_ids = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return token_ids.clamp_(max=weights.shape[1] - 1)


def score(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each row's sum of exponentials, [n] float32, and the rank (from
    1) of its token, [n] int64.
    """
    ranks = (logits > logits.gather(1, token_ids.unsqueeze(1))).sum(dim=-1) + 1
    return logits.logsumexp(dim=-1), ranks


def _at_least(weights: Tensor, lowest: Tensor) -> Tensor:
    return weights.masked_fill(weights < lowest.unsqueeze(1), 0) if bool(lowest.any()) else weights
