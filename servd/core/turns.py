"""Turns: which running requests skip a step, so that every pipeline stage has a step to compute.

A request's next step needs the token sampled by its last one, so steps that are in flight in
different stages have different requests: each step takes an equal share of all, of those whose
tokens are known. Prompts continue in any step, as their tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from servd.core.request import Request


class Turns:
    """Args: num_turns: steps in which each request is computed once; 1: none skips a step."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns

    def idle(self, running: Sequence[Request], idle: Set[int]) -> Set[int]:
        """The slots that skip the next step: `idle`, and those whose turn it is not."""
        if self.num_turns == 1:
            return idle
        room, waiting = -(-len(running) // self.num_turns), set(idle)
        for request in running:
            if request.num_placeholders:
                waiting.add(request.slot)
            elif request.num_uncomputed_tokens <= 1 and request.slot not in idle:
                room -= 1
                if room < 0:
                    waiting.add(request.slot)
        return waiting
