"""Outputs: what the clients are told next, one message for each."""

from __future__ import annotations

from collections.abc import Mapping

from servd.core.request import failure
from servd.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from servd.tracing import Mark, now_ns


class Outputs:
    """What has come of the steps since the clients were told last."""

    def __init__(self) -> None:
        self._messages: dict[int, EngineCoreOutputs] = {}  # by client

    def __bool__(self) -> bool:
        return bool(self._messages)

    def report_to(self, client: int) -> EngineCoreOutputs:
        """Let a client hear of the engine's new state, with no output beside. Its message."""
        return self._messages.setdefault(client, EngineCoreOutputs([]))

    def add(self, client: int, output: EngineCoreOutput) -> None:
        """Tell it what came of a request in a step."""
        self.report_to(client).outputs.append(output)

    def reject(self, request: EngineCoreRequest, error: str) -> None:
        """Tell it that a request cannot run at all."""
        marks = [*request.marks, Mark("queued", now_ns())]
        self.add(request.client, failure(request.request_id, marks, error))

    def go_on(self, decoded: Mapping[int, dict[str, int]]) -> None:
        """Tell clients of a token more of their requests, and of nothing else about these."""
        for client, tokens in decoded.items():
            message = self.report_to(client)
            if message.outputs or message.decoded:  # what they have already comes before
                message.outputs += EngineCoreOutputs([], decoded=tokens).all_outputs
            else:
                message.decoded = tokens

    def take(self) -> dict[int, EngineCoreOutputs]:
        """The messages, by client."""
        messages, self._messages = self._messages, {}
        return messages
