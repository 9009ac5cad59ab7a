"""Why so much of a prompt, and no more, was found in the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Self

import msgspec

from servd.api.protocol.requests import PrefixCache, PrefixDifference
from servd.api.timeline import Timeline
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
    """How an earlier prompt is like another one."""

    length: int  # tokens with which both begin
    obstacles: list[str]  # keys of WHY_NOT
    id: str
    next_token: int | None  # the first that differs, if it goes on

    @property
    def rank(self) -> tuple[int, int]:
        """Of prompts that share as much, the one that could have been found says more."""
        return self.length, -len(self.obstacles)


def explain_prefix(
    timeline: Timeline,
    nearest: Likeness | None,
    config: CacheConfig,
    token_text: Callable[[int], str],
) -> PrefixCache:
    """Compare a prompt with one that came before it.

    Args:
        timeline: a request whose prompt is kept and scheduled.
        nearest: see `Sought`.
        config: of the cache.
        token_text: shows a token.
    """
    size, prompt = config.block_size, timeline.prompt  # which may be dropped meanwhile
    # The last token is computed in any case: only that gives it a successor.
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
    """A prompt for which the earlier one of its owner is sought that begins most like it."""

    owner: str
    request_id: str
    prompt: bytes  # of array("I")
    salt: tuple[str | None, ...]
    engine: int
    before_ns: int  # when the prompt was scheduled
    cache_number: int | None = None  # None: of another API process, which counts by itself

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """That of a request."""
        return cls(
            timeline.owner, timeline.id, timeline.prompt.tobytes(), timeline.salt, timeline.engine,
            first(timeline.marks, "scheduled") or 0, timeline.cache_number,
        )  # fmt: skip

    def search(self, others: Iterable[Timeline]) -> Likeness | None:
        """Among these; None if none of them came before."""
        prompt, found = array("I", self.prompt), list[Likeness]()
        for other in others:
            tokens = other.prompt  # which may be dropped meanwhile
            if tokens and other.id != self.request_id and other.marks[0].at_ns < self.before_ns:
                length = common_length(prompt, tokens)
                following = tokens[length] if length < len(tokens) else None
                found.append(Likeness(length, self._obstacles(other), other.id, following))
        return max(found, key=attrgetter("rank"), default=None)

    def _obstacles(self, earlier: Timeline) -> list[str]:
        """What keeps the blocks of an earlier prompt from this one."""
        (salt, adapter), (own_salt, own_adapter) = earlier.salt, self.salt
        is_elsewhere = earlier.engine != self.engine
        was_emptied = self.cache_number not in (None, earlier.cache_number)
        applies = {
            "salt": salt != own_salt,
            "adapter": adapter != own_adapter,
            "engine": is_elsewhere,
            "emptied": was_emptied and not is_elsewhere,
        }
        return [reason for reason, is_so in applies.items() if is_so]


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
