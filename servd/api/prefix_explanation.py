"""Why so much of a prompt, and no more, was found in the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from servd.api.protocol.requests import PrefixCache, PrefixDifference
from servd.api.timeline import Timeline
from servd.config import CacheConfig

SECOND = 1e9  # nanoseconds
REASONS = {
    "salt": "but has another cache_salt",
    "adapter": "but has another adapter, or other weights of it",
    "engine": "but was sent to another engine",
    "emptied": "but the cache was emptied since: the engine slept or was started again",
}


def explain_prefix(
    timeline: Timeline,
    others: Iterable[Timeline],
    config: CacheConfig,
    token_text: Callable[[int], str],
) -> PrefixCache:
    """Compare a prompt with others that came before it.

    Args:
        timeline: a request whose prompt is kept and scheduled.
        others: of the same owner.
        config: of the cache.
        token_text: shows a token.
    """
    size, prompt = config.block_size, timeline.prompt  # which may be dropped meanwhile
    # The last token is computed in any case: only that gives it a successor.
    num_blocks = max(len(prompt) - 1, 0) // size
    num_matched = timeline.num_cached_tokens // size
    found = PrefixCache(size, num_blocks, num_matched)
    found.num_external = timeline.choices[0].num_external_tokens // size
    scheduled = next((m.at_ns for m in timeline.marks if m.stage == "scheduled"), 0)
    evicted = timeline.choices[0].evicted_at_ns
    if not config.enable_prefix_caching:
        found.reason, found.text = "disabled", "--no-enable-prefix-caching: nothing is kept"
    elif timeline.params is not None and timeline.params.prompt_logprobs is not None:
        found.reason = "prompt_is_read"
        found.text = "something of every prompt token was asked for, so all were computed"
    elif num_matched >= num_blocks:
        found.reason = "complete"
        rest = len(prompt) - num_matched * size
        found.text = f"all full blocks were found; the last {rest} tokens were computed"
    elif evicted:
        found.reason = "evicted"
        found.evicted_seconds_ago = round((scheduled - evicted) / SECOND, 3)
        found.text = f"block {num_matched} was evicted {found.evicted_seconds_ago:.1f} s before"
    else:
        _compare(found, timeline, prompt, others, scheduled, token_text)
    return found


def _compare(
    found: PrefixCache,
    timeline: Timeline,
    prompt: array[int],
    others: Iterable[Timeline],
    scheduled: int,
    token_text: Callable[[int], str],
) -> None:
    """Find the earlier prompt that begins most like this one."""
    likeness = [
        # Among prompts that share as much, the one that could have been found says more.
        (
            common_length(prompt, known),
            sum(_could_be_found(other, timeline)),
            other,
            known,
        )
        for other in others
        if other is not timeline and (known := other.prompt) and other.marks[0].at_ns < scheduled
    ]
    best = max(likeness, key=lambda each: each[:2], default=(0, 0, None, prompt))
    most, _, nearest, known = best
    if nearest is None:
        found.text = "no earlier prompt of this API key and API process is known"
    elif most >= (found.num_matched + 1) * found.block_size:
        lost = "which the cache has lost since"
        reasons = zip(REASONS.items(), _could_be_found(nearest, timeline), strict=True)
        found.reason, why = next((r for r, is_so in reasons if not is_so), (found.reason, lost))
        found.text = f"{nearest.id} shares {most} tokens, {why}"
    elif most == len(known):
        found.reason = "last_block"
        found.text = f"{nearest.id} ends after {most} tokens, and its last block was not full"
    else:
        token, other = prompt[most], known[most]
        found.reason = "different_token"
        found.difference = PrefixDifference(
            most, token, token_text(token), other, token_text(other), nearest.id
        )
        found.text = (
            f"token {most} is {token_text(token)!r}; in {nearest.id}, which is most like it, "
            f"{token_text(other)!r}"
        )


def _could_be_found(earlier: Timeline, later: Timeline) -> tuple[bool, ...]:
    """What keeps its blocks from a later prompt where it is not so, as in REASONS."""
    (salt, adapter), (own_salt, own_adapter) = earlier.salt, later.salt
    same_engine = earlier.engine == later.engine
    same_cache = not same_engine or earlier.cache_number == later.cache_number
    return salt == own_salt, adapter == own_adapter, same_engine, same_cache


def common_length(a: array[int], b: array[int]) -> int:
    """How many tokens two prompts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # the first `low` are alike, more than `high` are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
