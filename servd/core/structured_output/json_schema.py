"""Rewrites JSON schemas so that llguidance can enforce them: drops keywords that ask nothing, and
expresses some keywords by others. JSON Schema, draft 2020-12.
"""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

Schema = dict[str, Any]

# Formats of strings that llguidance enforces. Any other is an annotation.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
DRAFTS = {
    "draft-04/schema": "http://json-schema.org/draft-04/schema#",
    "draft-06/schema": "http://json-schema.org/draft-06/schema#",
    "draft-07/schema": "http://json-schema.org/draft-07/schema#",
    "draft/2019-09/schema": "https://json-schema.org/draft/2019-09/schema",
    "draft/2020-12/schema": "https://json-schema.org/draft/2020-12/schema",
}
# Keywords by what their value holds: a schema or a list of them, or schemas by name.
WITH_SCHEMAS = frozenset(
    "additionalItems additionalProperties allOf anyOf contains else if items not oneOf prefixItems"
    " propertyNames then unevaluatedItems unevaluatedProperties".split()
)
WITH_NAMED_SCHEMAS = frozenset(
    "$defs definitions dependencies dependentSchemas patternProperties properties".split()
)
APPLICATORS = frozenset("$ref $dynamicRef allOf anyOf oneOf if not dependentSchemas".split())
ANYTHING = (True, {}, None)  # schemas that allow every value; None: no schema
ANY_NAME = (*ANYTHING, {"type": "string"})


def simplify(schema: Any) -> Any:
    """Return a schema that allows the same values, with as few keywords as possible that
    llguidance refuses. Raise RecursionError for a schema that is nested too deeply.
    """
    if isinstance(schema, list):
        return [simplify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    simple: Schema = {}
    for keyword, value in schema.items():
        if keyword in WITH_SCHEMAS:
            value = simplify(value)
        elif keyword in WITH_NAMED_SCHEMAS and isinstance(value, dict):
            value = {name: simplify(item) for name, item in value.items()}
        simple[keyword] = value
    for rule in RULES:
        rule(simple)
    return simple


def _name_known_draft(schema: Schema) -> None:
    """Spell the draft as its specification does. Any other dialect counts as draft 2020-12."""
    address = schema.get("$schema")
    if isinstance(address, str):
        draft = re.sub(r"^https?://json-schema\.org/|#$", "", address)
        if draft in DRAFTS:
            schema["$schema"] = DRAFTS[draft]
        else:
            del schema["$schema"]


def _quote_reference(schema: Schema) -> None:
    """Percent-encode what may not stand in a URI, such as `<` and umlauts."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        reference = re.sub("%(?![0-9A-Fa-f]{2})", "%25", reference)
        schema["$ref"] = quote(reference, safe="#/%~!$&'()*+,;=:@?-._")


def _drop_unknown_format(schema: Schema) -> None:
    name = schema.get("format")
    if isinstance(name, str) and name not in FORMATS:
        del schema["format"]


def _drop_neutral_keywords(schema: Schema) -> None:
    """Drop keywords that allow every value, alone or without their companion."""
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    branches = (schema.get("then"), schema.get("else"))
    if schema.get("if") is None or all(branch in ANYTHING for branch in branches):
        _drop(schema, "if", "then", "else")
    if schema.get("contains") is None:
        _drop(schema, "minContains", "maxContains")
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        _drop(schema, "contains", "minContains")
    if schema.get("not") is False:
        del schema["not"]
    for keyword in ("unevaluatedItems", "unevaluatedProperties"):
        if schema.get(keyword) in ANYTHING:
            _drop(schema, keyword)
    if schema.get("propertyNames") in ANY_NAME:
        _drop(schema, "propertyNames")


def _close_object(schema: Schema) -> None:
    """Where no other schema applies, what is not evaluated is what is additional."""
    if "unevaluatedProperties" in schema and not schema.keys() & APPLICATORS:
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))


def _expand_dependencies(schema: Schema) -> None:
    """Say for each name of `dependent...` that it is absent, or that what depends on it holds."""
    conditions: list[Any] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependencies = schema.get(keyword)
        if not isinstance(dependencies, dict):
            continue
        for name, dependency in dependencies.items():
            if isinstance(dependency, list):
                present: Schema = {"required": [name, *dependency]}
            else:
                present = {"required": [name], "allOf": [dependency]}
            conditions.append({"anyOf": [{"properties": {name: False}}, present]})
        del schema[keyword]
    if conditions:
        schema["allOf"] = [*schema.get("allOf", []), *conditions]


def _expand_property_names(schema: Schema) -> None:
    """Express `propertyNames` by properties, for a list of names, one pattern, or no strings."""
    names = schema.get("propertyNames")
    properties = schema.get("properties", {})
    if not isinstance(names, dict) or not isinstance(properties, dict):
        return
    if schema.keys() & (APPLICATORS | {"patternProperties"}):
        return
    limits = names.keys() - {"type"}
    additional = schema.get("additionalProperties", True)
    if "string" not in names.get("type", "string"):
        schema["properties"] = {}
    elif limits in ({"enum"}, {"const"}):
        allowed = names["enum"] if "enum" in names else [names["const"]]
        schema["properties"] = {
            n: properties.get(n, additional) for n in allowed if isinstance(n, str)
        }
    elif properties:
        return
    elif limits == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: additional}
    elif limits and limits <= {"minLength", "maxLength"}:
        lengths = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        schema["patternProperties"] = {f"^(?s:.{{{lengths}}})$": additional}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _drop(schema: Schema, *keywords: str) -> None:
    for keyword in keywords:
        schema.pop(keyword, None)


RULES: tuple[Callable[[Schema], None], ...] = (
    _name_known_draft,
    _quote_reference,
    _drop_unknown_format,
    _drop_neutral_keywords,
    _close_object,
    _expand_dependencies,
    _expand_property_names,
)
