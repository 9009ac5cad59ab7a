"""Explains how much of a prompt was found in the prefix cache, and why the rest was not."""

from __future__ import annotations

import tomllib
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from servd.api.protocol.requests import PrefixCacheReport, PrefixDifference
from servd.api.request.timeline import Timeline
from servd.base.tracing import first
from servd.config import CacheConfig

REASONS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("prefix_misses.toml").read_text(encoding="utf8")
)
OBSTACLES = ("salt", "adapter", "engine", "emptied", "lost")  # `lost`: none known


def explain_prefix(
    timeline: Timeline,
    timelines: Iterable[Timeline],
    config: CacheConfig,
    token_text: Callable[[int], str],
) -> PrefixCacheReport:
    """Return the cache hits of a scheduled prompt, and the reason for its misses."""
    size = config.block_size
    prompt = timeline.tokens  # which may be dropped meanwhile
    # The last token is always computed: its logits give the first output token.
    num_blocks = max(len(prompt) - 1, 0) // size
    choice = timeline.choices[0]
    counts = choice.num_cached_tokens, choice.num_external_tokens, choice.num_uncovered_tokens
    num_matched, num_external, num_uncovered = (count // size for count in counts)
    report = PrefixCacheReport(size, num_blocks, num_matched, num_external, num_uncovered)
    num_lacking = num_blocks - num_matched
    num_found = num_matched + num_uncovered
    texts: dict[str, object] = {"block": num_found, "rest": len(prompt) - num_matched * size}
    if not config.enable_prefix_caching:
        report.reason = "disabled"
    elif timeline.reads_prompt:
        report.reason = "prompt_is_read"
    elif num_lacking <= 0:
        report.reason = "complete"
    elif 2 * num_uncovered >= num_lacking:
        report.reason = "no_checkpoint"
        texts.update(uncovered=num_uncovered * size, covered=num_matched * size)
    elif choice.evicted_at_ns:
        report.reason = "evicted"
        ago_ns = (first(timeline.marks, "scheduled") or 0) - choice.evicted_at_ns
        report.evicted_seconds_ago = round(ago_ns / 1e9, 3)
        texts["seconds"] = report.evicted_seconds_ago
    elif nearest := _find_nearest(timeline, prompt, timelines):
        length, earlier, tokens = nearest
        texts.update(id=earlier.request_id, length=length)
        end = _find_end(earlier, length, num_found, size)
        if length >= (num_found + 1) * size:
            report.reason = _obstacle(timeline, earlier)
        elif length == len(tokens) and end is not None:
            report.reason = "last_block"
            texts["length"] = end
        elif length < num_found * size:
            report.reason = "unknown"  # another API server has the prompt whose blocks were found
        else:
            report.reason = "different_token"
            text = token_text(prompt[length])
            other_text = token_text(tokens[length])
            texts.update(own=text, other=other_text)
            report.difference = PrefixDifference(
                length, prompt[length], text, tokens[length], other_text, earlier.request_id
            )
    report.text = REASONS[report.reason].format_map(texts)
    if report.reason == "lost":
        report.reason = "unknown"
    return report


def _find_nearest(
    timeline: Timeline, prompt: array[int], timelines: Iterable[Timeline]
) -> tuple[int, Timeline, array[int]] | None:
    """Return the length of the longest prefix that an earlier prompt shares, the earlier request
    and its tokens. Of equal lengths, prefer usable blocks. None without earlier prompts.
    """
    before_ns = first(timeline.marks, "scheduled") or 0
    candidates: list[tuple[int, int, Timeline, array[int]]] = []
    for earlier in timelines:
        tokens = earlier.tokens
        if tokens and earlier is not timeline and earlier.marks[0].at_ns < before_ns:
            rank = OBSTACLES.index(_obstacle(timeline, earlier))
            candidates.append((common_length(prompt, tokens), rank, earlier, tokens))
    if not candidates:
        return None
    length, _, nearest, tokens = max(candidates, key=lambda candidate: candidate[:2])
    return length, nearest, tokens


def _find_end(earlier: Timeline, length: int, block: int, size: int) -> int | None:
    """Return where a prompt of this length or one of its outputs ended in this block, if at all."""
    # The keys and values of an output's last token are not computed.
    ends = [length, *(length + choice.num_tokens - 1 for choice in earlier.choices)]
    return next((end for end in ends if end // size == block), None)


def _obstacle(timeline: Timeline, earlier: Timeline) -> str:
    """Return the reason why the cached blocks of an earlier prompt could not be used."""
    if earlier.salt != timeline.salt:
        return "salt" if earlier.salt[0] != timeline.salt[0] else "adapter"
    if earlier.rank != timeline.rank:
        return "engine"
    return "lost" if earlier.cache_number == timeline.cache_number else "emptied"


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
