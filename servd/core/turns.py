"""Turns: which running requests sit a step out, so that several steps can be computed at once.

A request's next step needs the token of its last one. Where steps go through stages one behind the
other, those in flight therefore have different requests: each step takes an equal share of all, of
those whose tokens are known. Prompts go on in any step, as their tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from servd.core.request import Request


class Turns:
    """Args: num_turns: steps in which every request has its turn once; 1: nobody waits."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns

    def idle(self, running: Sequence[Request], idle: Set[int]) -> Set[int]:
        """The slots that sit out the next step, `idle` and those whose turn it is not."""
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
