"""Outputs: the next message for each client."""

from collections.abc import Mapping

from servd.base.tracing import Clock, Mark, now_ns
from servd.core.request import Request, failure
from servd.messages.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest


class Outputs:
    def __init__(self, clock: Clock = now_ns) -> None:
        self._clock = clock
        self._messages: dict[int, EngineCoreOutputs] = {}  # by client

    def __bool__(self) -> bool:
        return bool(self._messages)

    def report_to(self, client: int) -> EngineCoreOutputs:
        """Return the client's next message, which has the engine's state even without outputs."""
        return self._messages.setdefault(client, EngineCoreOutputs([]))

    def add(self, client: int, output: EngineCoreOutput) -> None:
        self.report_to(client).outputs.append(output)

    def reject(self, request: EngineCoreRequest, error: str) -> None:
        now = self._clock()
        marks = [*request.marks, Mark("queued", now)]
        self.add(request.client, failure(request.request_id, marks, error, now))

    def report_abort(self, request: EngineCoreRequest | Request) -> None:
        """Send the marks that no output of an aborted request has carried."""
        message = self.report_to(request.client)
        if request.marks:
            message.aborted = message.aborted | {request.request_id: request.marks}

    def add_decoded(self, decoded: Mapping[int, dict[str, int]]) -> None:
        for client, tokens in decoded.items():
            message = self.report_to(client)
            if message.outputs or message.decoded:  # `decoded` is read before `outputs`
                message.outputs += EngineCoreOutputs([], decoded=tokens).all_outputs
            else:
                message.decoded = tokens

    def take(self) -> dict[int, EngineCoreOutputs]:
        messages, self._messages = self._messages, {}
        return messages
