"""Explains how much of a prompt was found in the prefix cache, and why not more."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Self

import msgspec

from servd.api.protocol.requests import PrefixCache, PrefixDifference
from servd.api.request_state import Timeline
from servd.config import CacheConfig
from servd.tracing import first

SECOND = 1e9  # nanoseconds
WHY_NOT = {  # found, though an earlier prompt has it
    "salt": "but has another cache_salt",
    "adapter": "but has another adapter, or other weights of it",
    "engine": "but was sent to another engine",
    "emptied": "but the cache was emptied since: the engine slept or was started again",
    "unknown": "which the cache has lost since",
}


class Likeness(msgspec.Struct):
    """What an earlier prompt has in common with a later one."""

    length: int  # tokens of the common prefix
    obstacles: list[str]  # keys of WHY_NOT
    id: str
    next_token: int | None  # the first different token, if the prompt is longer

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: longest common prefix first, then fewest obstacles to a cache hit."""
        return self.length, -len(self.obstacles)


def explain_prefix(
    timeline: Timeline,
    nearest: Likeness | None,
    config: CacheConfig,
    token_text: Callable[[int], str],
) -> PrefixCache:
    """Compare a prompt with an earlier one.

    Args:
        timeline: a request whose prompt is kept and scheduled.
        nearest: see `Sought`.
        config: of the prefix cache.
        token_text: renders a token.
    """
    size, prompt = config.block_size, timeline.tokens  # which may be dropped meanwhile
    # The last token is always computed: its logits give the first output token.
    num_blocks = max(len(prompt) - 1, 0) // size
    num_matched = timeline.num_cached_tokens // size
    num_external = timeline.choices[0].num_external_tokens // size
    found = PrefixCache(size, num_blocks, num_matched, num_external)
    if not config.enable_prefix_caching:
        told = "disabled", "nothing is kept: --no-enable-prefix-caching, or a model with states"
    elif timeline.reads_prompt:
        text = "something of every prompt token was asked for, so all were computed"
        told = "prompt_is_read", text
    elif num_matched >= num_blocks:
        rest = len(prompt) - num_matched * size
        told = "complete", f"all full blocks were found; the last {rest} tokens were computed"
    elif evicted := timeline.choices[0].evicted_at_ns:
        ago = ((first(timeline.marks, "scheduled") or 0) - evicted) / SECOND
        found.evicted_seconds_ago = round(ago, 3)
        told = "evicted", f"block {num_matched} was evicted {ago:.1f} s before"
    elif nearest is None:
        told = "unknown", "no earlier prompt of this API key is known"
    elif nearest.length >= (num_matched + 1) * size:
        reason = next(iter(nearest.obstacles), "unknown")
        told = reason, f"{nearest.id} shares {nearest.length} tokens, {WHY_NOT[reason]}"
    elif (other := nearest.next_token) is None:
        text = f"{nearest.id} ends after {nearest.length} tokens, and its last block was not full"
        told = "last_block", text
    else:
        at, token = nearest.length, prompt[nearest.length]
        own, others = token_text(token), token_text(other)
        found.difference = PrefixDifference(at, token, own, other, others, nearest.id)
        text = f"token {at} is {own!r}; in {nearest.id}, which is most like it, {others!r}"
        told = "different_token", text
    found.reason, found.text = told
    return found


class Sought(msgspec.Struct):
    """A search for the owner's earlier prompt with the longest common prefix with this one."""

    owner: str
    request_id: str
    prompt: bytes  # of array("I")
    salt: tuple[str | None, ...]
    engine: int
    before_ns: int  # when the prompt was scheduled
    cache_number: int | None = None  # None: in another API process, whose count differs

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        return cls(
            timeline.owner, timeline.request_id, timeline.tokens.tobytes(), timeline.salt,
            timeline.rank, first(timeline.marks, "scheduled") or 0, timeline.cache_number,
        )  # fmt: skip

    def search(self, others: Iterable[Timeline]) -> Likeness | None:
        """The result among these requests; None if none of them is earlier."""
        prompt, found = array("I", self.prompt), list[Likeness]()
        for other in others:
            tokens = other.tokens  # which may be dropped meanwhile
            is_earlier = other.marks[0].at_ns < self.before_ns
            if tokens and is_earlier and other.request_id != self.request_id:
                length = common_length(prompt, tokens)
                following = tokens[length] if length < len(tokens) else None
                found.append(Likeness(length, self._obstacles(other), other.request_id, following))
        return max(found, key=attrgetter("rank"), default=None)

    def _obstacles(self, earlier: Timeline) -> list[str]:
        """Why the cached blocks of an earlier prompt could not be used for this one."""
        (salt, adapter), (own_salt, own_adapter) = earlier.salt, self.salt
        is_elsewhere = earlier.rank != self.engine
        was_emptied = self.cache_number not in (None, earlier.cache_number)
        applies = {
            "salt": salt != own_salt,
            "adapter": adapter != own_adapter,
            "engine": is_elsewhere,
            "emptied": was_emptied and not is_elsewhere,
        }
        return [reason for reason, is_so in applies.items() if is_so]


def common_length(a: array[int], b: array[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # the first `low` are alike, more than `high` are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
