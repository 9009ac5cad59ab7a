"""Translates requests of the Responses and Messages APIs into chat requests, and errors back."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import core_schema, to_json

from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.generation import SHARED_PARAMS, GenerationRequest
from servd.api.protocol.structured import StructuredRequest
from servd.api.protocol.validation import RequestBody, Schema, parse, wrong_field
from servd.base.errors import RequestError
from servd.messages.params import SamplingParams

# Sampling parameters that the other APIs have under another name, or whose effect their responses
# have no place for.
OWN_WAYS = {
    "include_stop_str_in_output",
    "logprob_token_ids",
    "logprobs",
    "max_tokens",
    "n",
    "prompt_logprobs",
    "temperature",
    "thinking_token_budget",
    "top_p",
}
# Fields of the chat route that keep their name and meaning in both other APIs.
EXTENSIONS = frozenset(
    (ChatCompletionRequest.model_fields.keys() & set(SamplingParams.__struct_fields__)) - OWN_WAYS
    | (StructuredRequest.__annotations__.keys() - {"response_format"})
    | {"cache_salt", "chat_template_kwargs", "prompt_cache_retention", "retention"}
    | {"return_progress"}
)


class TranslatedRequest(RequestBody):
    """Base of the bodies that are translated into a chat request."""

    from_chat = EXTENSIONS
    lacking = dict.fromkeys(("include_stop_str_in_output", "watermarking"), "leave it out")
    chat_class: ClassVar[type[ChatCompletionRequest]] = ChatCompletionRequest

    stream: bool | None = None

    def ignored(self) -> set[str]:
        names = super().ignored()
        # A client can stream the events of a background response later.
        has_stream = self.stream or vars(self).get("background")
        if (self.model_extra or {}).get("return_progress") and not has_stream:
            names.add("return_progress")
        return names

    @classmethod
    def complete_schema(cls, properties: dict[str, Schema], handler: GetJsonSchemaHandler) -> None:
        """Add the fields of chats."""
        super().complete_schema(properties, handler)
        # Only inside of another schema is it made with its `complete_schema`.
        listed = handler(core_schema.list_schema(ChatCompletionRequest.__pydantic_core_schema__))
        chat_properties = handler.resolve_ref_schema(listed["items"])["properties"]
        for name in sorted(EXTENSIONS):
            properties.setdefault(name, chat_properties[name])

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the descriptions of the fields, of which sampling parameters share the chat's."""
        texts = GenerationRequest.descriptions()
        shared = {name: texts[name] for name in SHARED_PARAMS}
        return shared | {"stop_sequences": texts["stop"]} | super().descriptions()

    def as_chat(self, fields: dict[str, Any]) -> ChatCompletionRequest:
        """Return the chat request with these fields and the chat fields that the body adds. Raise
        InvalidRequest if the chat request is not valid, or if the body sets a field under two
        names.
        """
        extra = self.model_extra or {}
        if self.priority is not None:
            fields["priority"] = self.priority
        for name in EXTENSIONS & extra.keys():
            made = fields.get(name)  # from fields of this API
            if isinstance(made, dict) and isinstance(extra[name], dict):
                fields[name] = made | extra[name]
            elif made is not None:
                raise wrong_field(name, "duplicates a field of this API: leave it out")
            else:
                fields[name] = extra[name]
        return parse(self.chat_class, to_json(fields, inf_nan_mode="constants"))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replace chat fields in errors with the client's field names. `names`: chat field -> body's.

    Only a field that begins the message is replaced. The same word elsewhere may be user text.
    """
    try:
        yield
    except RequestError as error:
        if error.param and (root := re.match(r"\w+", error.param)):
            if name := names.get(root[0]):
                error.param = name
                pattern = rf"^((?:every entry of )?){root[0]}\b"
                error.message = re.sub(pattern, rf"\1{name}", error.message)
        raise
