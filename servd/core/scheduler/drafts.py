"""Drafts: asks the workers for draft tokens, and counts which are accepted."""

from collections.abc import Iterable
from dataclasses import dataclass

from servd.core.draft_length import DraftLengthController
from servd.core.kv_cache.manager import KVCacheManager
from servd.core.request import Request
from servd.core.step import NO_DRAFTS, Step
from servd.messages.engine import EngineCoreOutput, ModelRunnerOutput, ScheduledRequest


def choose_drafts(
    request: Request, grammar_tokens: list[int] | None, in_flight: Iterable[Step]
) -> tuple[list[int], int]:
    """Return the engine's own drafts for a request's next step, and the number of drafts to verify:
    without own drafts, the workers'. `grammar_tokens`: the only tokens allowed next.
    """
    if grammar_tokens is None:
        return NO_DRAFTS, request.num_drafts
    if any(step.chose_drafts_of(request) for step in in_flight):
        return NO_DRAFTS, 0
    drafts = request.grammar_drafts(grammar_tokens)
    return drafts, len(drafts)


@dataclass(eq=False)
class Drafts:
    """Requests drafts, and counts those that are accepted."""

    draft_length: DraftLengthController  # decides how many drafts pay
    kv_cache: KVCacheManager  # allocates blocks

    def count_useful(self, request: Request) -> int:
        """Return how many drafts are worth their time; 0 if there is no room."""
        has_room = request.num_tokens + 2 < request.max_num_tokens
        return self.draft_length.num_drafts(request.acceptance) if has_room else 0

    def request_drafts(
        self, request: Request, scheduled: ScheduledRequest, num_drafts: int
    ) -> None:
        """Ask the workers for as many drafts as are worth their time, with room for one more token.
        Allocates blocks, because a draft model has its own keys and values. `num_drafts`: the
        result of `count_useful`; 0 if it was not called.
        """
        room = request.max_num_tokens - request.num_tokens - 1
        num_drafts = num_drafts or self.draft_length.num_drafts(request.acceptance)
        num_drafts = max(min(num_drafts, room), 0)
        block_ids = self.kv_cache.extend(request, num_drafts) if num_drafts else []
        if block_ids is None:
            block_ids = []
            num_drafts = 0
        scheduled.new_block_ids += block_ids
        scheduled.max_new_drafts = num_drafts
        request.num_drafts = num_drafts

    def settle(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        output: EngineCoreOutput,
        result: ModelRunnerOutput,
        row: int,
    ) -> int:
        """Count the drafts that were accepted, and those found for the next step. Adds counts to
        `output`. Returns how many accepted drafts are part of the output.
        """
        num_sampled = len(result.tokens_of(row))
        num_found = len(result.draft_token_ids.get(row, ()))
        num_kept = request.settle(scheduled, output, num_sampled, num_found)
        if request.acceptance is not None:
            num_asked = scheduled.max_new_drafts
            request.acceptance.count(output.num_drafts, output.num_accepted, num_asked, num_found)
        return num_kept
