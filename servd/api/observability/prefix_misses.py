"""Explains how much of a prompt was found in the prefix cache, and why not more."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import msgspec

from servd.api.protocol.requests import PrefixCache, PrefixDifference
from servd.api.request_state import Timeline
from servd.config import CacheConfig
from servd.tracing import first

# Reason -> text for users. {id} is the earlier prompt that is most like this one.
REASONS = {
    "disabled": "nothing is kept: --no-enable-prefix-caching, or a model with states",
    "prompt_is_read": "something of every prompt token was asked for, so all were computed",
    "complete": "all full blocks were found; the last {rest} tokens were computed",
    "evicted": "block {block} was evicted {seconds} s before",
    "unknown": "no earlier prompt of this API key is known",
    "last_block": "{id} ends after {length} tokens, and its last block was not full",
    "different_token": "token {length} is {own!r}; in {id}, which is most like it, {other!r}",
    "salt": "{id} shares {length} tokens, but has another cache_salt",
    "adapter": "{id} shares {length} tokens, but has another adapter, or other weights of it",
    "engine": "{id} shares {length} tokens, but was sent to another engine",
    "emptied": "{id} shares {length} tokens, but the cache was emptied since: the engine slept or "
    "was started again",
    "lost": "{id} shares {length} tokens, which the cache has lost since",
}


class EarlierPrompt(msgspec.Struct, order=True):
    """What an earlier prompt has in common with a later one. The greatest explains most."""

    length: int  # tokens of the common prefix
    has_no_obstacle: bool
    reason: str  # why its cached blocks could not be used, a key of REASONS
    request_id: str
    next_token: int  # the first different token; -1 if it ends before


class PromptQuery(msgspec.Struct):
    """A search for the owner's earlier prompt with the longest common prefix with this one."""

    owner: str
    request_id: str
    prompt: bytes  # of array("I")
    salt: tuple[str | None, ...]
    engine: int
    before_ns: int  # when the prompt was scheduled
    cache_number: int | None  # None: in another API process, whose count differs

    def search(self, others: Iterable[Timeline]) -> EarlierPrompt | None:
        """Return the result among these requests; None if none of them is earlier."""
        prompt = array("I", self.prompt)
        found: list[EarlierPrompt] = []
        for other in others:
            tokens = other.tokens  # which may be dropped meanwhile
            is_earlier = other.marks[0].at_ns < self.before_ns
            if tokens and is_earlier and other.request_id != self.request_id:
                length = common_length(prompt, tokens)
                reason = self._obstacle(other)
                next_token = tokens[length] if length < len(tokens) else -1
                found.append(
                    EarlierPrompt(length, reason == "lost", reason, other.request_id, next_token)
                )
        return max(found, default=None)

    def _obstacle(self, earlier: Timeline) -> str:
        """Why the cached blocks of an earlier prompt could not be used for this one."""
        if earlier.salt != self.salt:
            return "salt" if earlier.salt[0] != self.salt[0] else "adapter"
        if earlier.rank != self.engine:
            return "engine"
        return "lost" if self.cache_number in (None, earlier.cache_number) else "emptied"


def explain_prefix(
    timeline: Timeline,
    nearest: EarlierPrompt | None,
    config: CacheConfig,
    token_text: Callable[[int], str],
) -> PrefixCache:
    """Say how much of the prompt of a scheduled request was cached, and why not more; `nearest` is
    the earlier prompt that is most like it.
    """
    size = config.block_size
    prompt = timeline.tokens  # which may be dropped meanwhile
    # The last token is always computed: its logits give the first output token.
    num_blocks = max(len(prompt) - 1, 0) // size
    num_matched = timeline.num_cached_tokens // size
    choice = timeline.choices[0]
    found = PrefixCache(size, num_blocks, num_matched, choice.num_external_tokens // size)
    texts: dict[str, object] = {"block": num_matched, "rest": len(prompt) - num_matched * size}
    if not config.enable_prefix_caching:
        found.reason = "disabled"
    elif timeline.reads_prompt:
        found.reason = "prompt_is_read"
    elif num_matched >= num_blocks:
        found.reason = "complete"
    elif choice.evicted_at_ns:
        found.reason = "evicted"
        ago_ns = (first(timeline.marks, "scheduled") or 0) - choice.evicted_at_ns
        texts["seconds"] = found.evicted_seconds_ago = round(ago_ns / 1e9, 3)
    elif nearest is not None:
        length = nearest.length
        texts.update(id=nearest.request_id, length=length)
        if length >= (num_matched + 1) * size:
            found.reason = nearest.reason
        elif nearest.next_token < 0:
            found.reason = "last_block"
        else:
            found.reason = "different_token"
            own = token_text(prompt[length])
            other = token_text(nearest.next_token)
            texts.update(own=own, other=other)
            found.difference = PrefixDifference(
                length, prompt[length], own, nearest.next_token, other, nearest.request_id
            )
    found.text = REASONS[found.reason].format_map(texts)
    if found.reason == "lost":
        found.reason = "unknown"
    return found


def common_length(a: array[int], b: array[int]) -> int:
    low = 0
    high = min(len(a), len(b))
    while low < high:  # the first `low` are alike, more than `high` are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
