"""Stage: runs a model runner as one stage of pipeline parallelism.

Each stage computes another step, with other requests. The executor sends the sampled tokens to the
earlier stages before their requests are scheduled again.
"""

from collections import deque
from typing import Any

import numpy as np
import torch

from servd.messages.engine import GrammarOutput, SchedulerOutput
from servd.worker.device.device import upload
from servd.worker.loading.pipeline_model import IntermediateTensors
from servd.worker.runner.model_runner import AsyncOutput, ModelRunner


class Stage:
    """Receives hidden states from the previous stage, computes its layers, and sends the result to
    the next stage. The last stage samples.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.parallel = runner.parallel
        self.intermediate_tensors = next(
            (m for _, m in runner.model.named_modules() if isinstance(m, IntermediateTensors)), None
        )
        if self.intermediate_tensors is not None:
            self.intermediate_tensors.make_room(runner.max_num_tokens)
        if not self.parallel.is_last_stage:
            runner.output_heads.clear()  # heads need the last layer's output
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()  # sends in progress
        self.slots: list[int] = []  # slots of the latest launched step, number `step`
        self.step = 0
        self.in_flight: deque[tuple[int, list[int]]] = deque()  # steps whose tokens are unknown
        self.entered: dict[int, int] = {}  # slot -> step in which its request was added

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.step = scheduled.step
        self.slots = scheduled.slots
        self.entered |= dict.fromkeys((new.slot for new in scheduled.new_requests), self.step)
        if self.intermediate_tensors is not None and scheduled.total_num_scheduled_tokens:
            self.parallel.receive(
                self.intermediate_tensors.stream[: scheduled.total_num_scheduled_tokens]
            )
        self.runner.execute_model(scheduled)
        state = self.runner.execute_model_state
        assert state is not None
        if state.computed is not None and not self.parallel.is_last_stage:
            # A copy: the next step may reuse the memory.
            stream = state.computed[1].clone()
            self.sent.append((self.parallel.send(stream), stream))
            if len(self.sent) > self.parallel.num_stages:
                self.sent.popleft()[0].wait()

    def sample_tokens(self, bitmask: GrammarOutput | None = None) -> AsyncOutput:
        """Sample in the last stage. Other stages receive the tokens by `take_tokens`."""
        if self.parallel.is_last_stage:
            return self.runner.sample_tokens(bitmask)
        state, self.runner.execute_model_state = self.runner.execute_model_state, None
        if state is None:
            raise RuntimeError("sample_tokens was called before execute_model")
        self.in_flight.append((self.step, self.slots))
        return AsyncOutput(state.num_rows, times_ns=state.times_ns)

    @torch.inference_mode()
    def take_tokens(self, sampled: list[list[int]]) -> None:
        """Store the tokens of the oldest step in flight, except in reassigned slots."""
        step, slots = self.in_flight.popleft()
        tokens = [
            (slot, offset, token_id)
            for slot, token_ids in zip(slots, sampled, strict=True)
            if self.entered[slot] <= step
            for offset, token_id in enumerate(token_ids)
        ]
        if tokens:
            states = self.runner.states
            rows, offsets, ids = upload(np.array(tokens, dtype=np.int64).T, states.token_ids.device)
            states.write(rows, states.num_computed[rows] + offsets, ids)
            states.num_computed.index_add_(0, rows, (offsets > 0).long())  # accepted drafts
