"""Why so much of a prompt, and no more, was found in the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import msgspec

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


class Likeness(msgspec.Struct):
    """How an earlier prompt is like another one."""

    length: int  # tokens with which both begin
    could_be_found: tuple[bool, ...]  # see REASONS
    id: str
    next_token: int | None  # the first that differs, if it goes on


def explain_prefix(
    timeline: Timeline,
    nearest: Likeness | None,
    config: CacheConfig,
    token_text: Callable[[int], str],
) -> PrefixCache:
    """Compare a prompt with one that came before it.

    Args:
        timeline: a request whose prompt is kept and scheduled.
        nearest: see `FindPrompt`.
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
        _compare(found, prompt, nearest, token_text)
    return found


def _compare(
    found: PrefixCache,
    prompt: array[int],
    nearest: Likeness | None,
    token_text: Callable[[int], str],
) -> None:
    """Say what the earlier prompt that begins most like this one tells."""
    if nearest is None:
        found.text = "no earlier prompt of this API key is known"
        return
    most, other = nearest.length, nearest.next_token
    if most >= (found.num_matched + 1) * found.block_size:
        lost = "which the cache has lost since"
        reasons = zip(REASONS.items(), nearest.could_be_found, strict=True)
        found.reason, why = next((r for r, is_so in reasons if not is_so), (found.reason, lost))
        found.text = f"{nearest.id} shares {most} tokens, {why}"
    elif other is None:
        found.reason = "last_block"
        found.text = f"{nearest.id} ends after {most} tokens, and its last block was not full"
    else:
        token = prompt[most]
        found.reason = "different_token"
        found.difference = PrefixDifference(
            most, token, token_text(token), other, token_text(other), nearest.id
        )
        found.text = (
            f"token {most} is {token_text(token)!r}; in {nearest.id}, which is most like it, "
            f"{token_text(other)!r}"
        )


class FindPrompt(msgspec.Struct, tag=True):
    """The earlier prompt of an owner that begins most like this one; None if none is known."""

    answer: ClassVar[Any] = Likeness | None
    owner: str
    request_id: str
    prompt: bytes  # of array("I")
    salt: tuple[str | None, ...]
    engine: int
    before_ns: int  # when the prompt was scheduled
    cache_number: int | None = None  # None: of another API process, which counts by itself

    @classmethod
    def of(cls, timeline: Timeline) -> FindPrompt:
        """For a request whose prompt is kept."""
        scheduled = next((m.at_ns for m in timeline.marks if m.stage == "scheduled"), 0)
        return cls(
            timeline.owner, timeline.id, timeline.prompt.tobytes(), timeline.salt,
            timeline.engine, scheduled, timeline.cache_number,
        )  # fmt: skip

    def search(self, others: Iterable[Timeline]) -> Likeness | None:
        """Among these. Of prompts that share as much, the one that could have been found says
        more.
        """
        prompt = array("I", self.prompt)
        known = [
            (common_length(prompt, tokens), self._could_find(other), other.id, tokens)
            for other in others
            if other.id != self.request_id
            and (tokens := other.prompt)  # which may be dropped meanwhile
            and other.marks[0].at_ns < self.before_ns
        ]
        if not known:
            return None
        length, could, name, tokens = max(known, key=lambda each: (each[0], sum(each[1])))
        return Likeness(length, could, name, tokens[length] if length < len(tokens) else None)

    def _could_find(self, earlier: Timeline) -> tuple[bool, ...]:
        """What keeps its blocks from this prompt where it is not so, as in REASONS."""
        (salt, adapter), (own_salt, own_adapter) = earlier.salt, self.salt
        same_engine = earlier.engine == self.engine
        counts = same_engine and self.cache_number is not None
        same_cache = not counts or earlier.cache_number == self.cache_number
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
