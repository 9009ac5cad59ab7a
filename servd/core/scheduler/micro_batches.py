"""MicroBatches: chooses running requests to skip a step, so that every pipeline stage has work.

A request's next step needs its last sampled token, so steps in different stages have different
requests. Each step takes an equal share of all requests, from those whose tokens are known. Prompts
continue in any step, as their tokens are known.
"""

from collections.abc import Sequence, Set

from servd.core.request import Request


class MicroBatches:
    """Splits the running requests: each runs once in `num_batches` steps; 1: no request skips."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def choose_idle(self, running: Sequence[Request], idle: Set[int]) -> Set[int]:
        """Return the slots that skip the next step: `idle`, and slots of other micro-batches."""
        if self.num_batches == 1:
            return idle
        room = -(-len(running) // self.num_batches)
        skipping = set(idle)
        for request in running:
            if request.num_placeholders:
                skipping.add(request.slot)
            elif request.num_uncomputed_tokens <= 1 and request.slot not in idle:
                room -= 1
                if room < 0:
                    skipping.add(request.slot)
        return skipping
