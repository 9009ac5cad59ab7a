"""The fields for structured outputs: response_format, structured_outputs and guided_*."""

import json
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field

from servd.api.protocol.validation import ClosedObject, FewKeys, OpenObject, RequestBody
from servd.base.errors import InvalidRequest
from servd.messages.params import StructuredOutput

Schema = dict[str, Any] | str  # JSON, or JSON as text
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1)]
# Other names of fields -> the keys of `structured_outputs`: vLLM's former ones, then SGLang's and
# llama-server's.
FORMS: dict[str, Any] = {
    f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")
} | {"ebnf": "grammar", "grammar": "grammar", "json_schema": "json", "regex": "regex"}


class JsonSchemaFormat(OpenObject):
    """The schema of `response_format`. Every output follows it, whatever `strict` is."""

    schema: dict[str, Any]
    name: NotRequired[str | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


# What no type of a key says: `json_schema` needs a schema, under one of its two names.
NEEDS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"properties": {"type": {"enum": ["text", "json_object", "structural_tag"]}}},
        {"properties": {"json_schema": {"type": "object"}}, "required": ["json_schema"]},
        {"properties": {"schema": {"type": "object"}}, "required": ["schema"]},
    ]
}


class ResponseFormat(ClosedObject):
    """OpenAI's field for JSON outputs."""

    __pydantic_config__ = ConfigDict(  # type: ignore[misc]
        extra="forbid", strict=True, json_schema_extra=NEEDS_SCHEMA
    )

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NotRequired[JsonSchemaFormat | None]
    schema: NotRequired[dict[str, Any] | None]  # as llama-server has it
    # A structural tag as XGrammar has it: `format`, or the older `structures` and `triggers`.
    format: NotRequired[dict[str, Any] | None]
    structures: NotRequired[Annotated[list[dict[str, Any]], Field(max_length=1024)] | None]
    triggers: NotRequired[Annotated[list[str], Field(max_length=1024)] | None]


class StructuredOutputs(ClosedObject, total=False):
    """vLLM's field for structured outputs. Set one key."""

    json: Schema | None
    json_object: bool | None
    regex: str | None
    choice: Choices | None
    grammar: str | None
    structural_tag: Schema | None


class StructuredRequest(RequestBody):
    """The fields for structured outputs. A request may set one form."""

    response_format: Annotated[ResponseFormat | None, FewKeys] = None
    """Form of the output: `json_schema`, `json_object` or `text`, as in OpenAI's API, or
    `structural_tag`."""
    structured_outputs: Annotated[StructuredOutputs | None, FewKeys] = None
    """Form of the output: one of `json`, `json_object`, `regex`, `choice`, `grammar` and
    `structural_tag`."""
    guided_json: Schema | None = None
    """vLLM's former name of a key in `structured_outputs`."""
    guided_regex: str | None = None
    """vLLM's former name of a key in `structured_outputs`."""
    guided_choice: Choices | None = None
    """vLLM's former name of a key in `structured_outputs`."""
    guided_grammar: str | None = None
    """vLLM's former name of a key in `structured_outputs`."""
    regex: str | None = None
    """SGLang's name of a key in `structured_outputs`."""
    ebnf: str | None = None
    """SGLang's name of `grammar` in `structured_outputs`."""
    grammar: str | None = None
    """llama-server's name of a key in `structured_outputs`."""
    json_schema: Schema | None = None
    """SGLang's and llama-server's name of `json` in `structured_outputs`."""

    def structured_output(self) -> StructuredOutput | None:
        """Return the form of the output; None for free text. Raise InvalidRequest if two different
        forms are set, or a JSON schema is missing.
        """
        outputs: list[StructuredOutput] = []
        if self.response_format and self.response_format["type"] != "text":
            outputs.append(_response_format(self.response_format))
        for kind, value in (self.structured_outputs or {}).items():
            if value not in (None, False):
                outputs.append(_form(kind, value, f"structured_outputs.{kind}"))
        for name in FORMS:
            value = vars(self)[name]
            is_set = value is not None if name.startswith("guided_") else bool(value)
            if is_set:
                outputs.append(_form(FORMS[name], value, name))
        # Some clients send a form under several names, for servers of any age.
        forms = list({(form.kind, form.value): form for form in reversed(outputs)}.values())[::-1]
        if len(forms) > 1:
            names = " and ".join(f"`{form.param}`" for form in forms)
            raise InvalidRequest(
                f"{names} cannot be used together: send one of them", param=forms[1].param
            )
        return forms[0] if forms else None


def _response_format(field: ResponseFormat) -> StructuredOutput:
    if (schema := field.get("schema")) is not None:
        return _form("json", schema, "response_format")
    if field["type"] == "structural_tag":
        return _form("structural_tag", field, "response_format")
    if field["type"] == "json_object":
        return StructuredOutput("json_object", param="response_format")
    schema = field.get("json_schema")
    if schema is None:
        param = "response_format.json_schema"
        raise InvalidRequest(f"`{param}` is missing: it must hold the `schema`", param=param)
    return _form("json", schema["schema"], "response_format")


def _form(kind: Any, value: Any, param: str) -> StructuredOutput:
    if kind == "json_object":
        return StructuredOutput("json_object", param=param)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return StructuredOutput(kind, text, param=param)
