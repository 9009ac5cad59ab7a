"""RequestLog: logs requests, with --enable-log-requests."""

import logging
from dataclasses import dataclass

from msgspec.structs import asdict

from servd.api.request.observer import Observer
from servd.api.request.request_state import RequestState
from servd.messages.params import SamplingParams

log = logging.getLogger("servd.requests")


@dataclass
class RequestLog(Observer):
    """An observer that logs each prompt sent to an engine, with the parameters that are set."""

    max_length: int | None  # characters and token ids of a prompt that are logged

    def began(self, state: RequestState) -> None:
        params = state.request.params
        if isinstance(params, SamplingParams):
            params = state.params  # with parameters of the text, which the engine does not get
        usual = asdict(type(params)())
        changed = {name: value for name, value in asdict(params).items() if value != usual[name]}
        fields = {
            "prompt_id": state.request_id,
            "prompt": None if state.prompt is None else state.prompt[: self.max_length],
            "num_prompt_tokens": len(state.prompt_token_ids),
            "prompt_token_ids": state.prompt_token_ids[: self.max_length],
            "params": changed,
        }
        log.info("%s: prompt %r, %d tokens %s, %s", *fields.values(), extra={"fields": fields})
