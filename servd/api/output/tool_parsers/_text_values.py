"""Plain text values of arguments: the types that a JSON schema allows, and their Lark grammar."""

from functools import reduce
from typing import Any
from urllib.parse import unquote

from servd.api.output.call_grammar import ANNOTATIONS, NotExpressible, quoted

OF_VALUES = {"type", "enum", "const"}  # keywords that texts can obey
OF_TEXTS = OF_VALUES | {"minLength", "maxLength"}
# Keywords that say something of other types: a text is then read as JSON, if it is JSON.
OF_OTHER_TYPES = set(
    "properties required additionalProperties patternProperties items prefixItems minItems "
    "maxItems uniqueItems contains minimum maximum exclusiveMinimum exclusiveMaximum multipleOf "
    "not minProperties maxProperties propertyNames dependentRequired".split()
)
ANYTHING = {"not": False}
NULLS = ("null", "None")  # texts that stand for null where a schema allows it


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that a schema allows: `string` if it states nothing, `any` if it allows
    values of several types. `root` is the schema to which references refer.
    """
    stated = _stated_types(schema, root, set())
    return {"string"} if stated is None else stated


def types_of_property(schema: Any, name: str) -> set[str]:
    """Return the JSON types that an object's schema allows for a property."""
    try:
        return types_of(_property_of(schema, name, schema, set()), schema)
    except RecursionError:  # hundreds of references, each to the next
        return {"any"}


def _stated_types(schema: Any, root: Any, references: set[str]) -> set[str] | None:
    """Return the types of `types_of`, or None if the schema states nothing (see `_parts`)."""
    stated: list[set[str]] = []
    for part in _parts(schema, root, references):
        kind = part.get("type")
        if isinstance(kind, str | list):
            stated.append({kind} if isinstance(kind, str) else set(map(str, kind)))
        if values := _values(part):
            stated.append({"string" if all(isinstance(v, str) for v in values) else "any"})
        for options in (list_of(part.get("anyOf")), list_of(part.get("oneOf"))):
            allowed: set[str] = set()
            for option in options:
                unstated = set[str]() if _reference(option) else {"string"}
                types = _stated_types(option, root, references)
                allowed |= unstated if types is None else types
            if options:
                stated.append(allowed)
        if part.keys() & OF_OTHER_TYPES:
            stated.append({"any"})
    return reduce(_common_types, stated) if stated else None


def _parts(schema: Any, root: Any, references: set[str]) -> list[dict[str, Any]]:
    """Return a schema with those of its `allOf` and `$ref`, which all hold. `references` has the
    references that were followed: each is followed once.
    """
    parts = [schema]
    for part in parts:
        if not isinstance(part, dict):
            continue
        parts += list_of(part.get("allOf"))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            target = _find(root, reference)
            parts.append(ANYTHING if target is None else target)
    return [part for part in parts if isinstance(part, dict)]


def _common_types(types: set[str], other_types: set[str]) -> set[str]:
    if "any" in other_types:
        return types
    if "any" in types:
        return other_types
    all_types = types | other_types
    integers = {"integer"} if {"integer", "number"} <= all_types else set()
    return (types & other_types) | integers


def _property_of(schema: Any, name: str, root: Any, references: set[str]) -> Any:
    """Return what all parts of an object's schema state of a property, as a schema; None if
    nothing (see `_parts`).
    """
    stated: list[Any] = []
    for part in _parts(schema, root, references):
        properties = part.get("properties")
        if isinstance(properties, dict) and properties.get(name) is not None:
            stated.append(properties[name])
        elif isinstance(additional := part.get("additionalProperties"), dict):
            stated.append(additional)
        branches = [part.get("then"), part.get("else")]
        for options in (list_of(part.get("anyOf")), list_of(part.get("oneOf")), branches):
            schemas = [_property_of(option, name, root, references) for option in options]
            if schemas := [schema for schema in schemas if schema is not None]:
                stated.append({"anyOf": schemas})
    return {"allOf": stated} if len(stated) > 1 else next(iter(stated), None)


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def texts_of(schema: Any, root: Any, end: str, line: str = "\n") -> list[str]:
    r"""Return Lark literals and regular expressions for the texts that match a schema which allows
    strings. `root` is the schema to which references refer.

    Each text starts after the opening tag and `line` (a line break, or nothing), and includes the
    closing tag `end`. A `line` before `end` is not part of the value. All values are strings, or
    null if the schema allows null. Match regular expressions as lazily as possible. Raises
    NotExpressible: no text matches, or texts cannot be told apart in this way.
    """
    collector = _Texts(root, end, line)
    collector.add(schema)
    allows_null = "null" in types_of(schema, root)
    if not collector.texts or (allows_null and collector.null not in collector.texts):
        raise NotExpressible("a string that could not be told from null")
    return collector.texts


class _Texts:
    """A collector of the texts that the options of a schema allow."""

    def __init__(self, root: Any, end: str, line: str) -> None:
        self.root = root
        self.end = end
        self.line = line
        self.null = quoted(f"null{line}{end}")
        self.texts: list[str] = []
        self.references: set[str] = set()

    def add(self, schema: Any) -> None:
        while (reference := _reference(schema)) is not None:
            schema = None if reference in self.references else _find(self.root, reference)
            if schema is None:
                raise NotExpressible("a reference to nowhere, or the same one twice")
            self.references.add(reference)
        schema = {} if schema in (None, True) else schema
        if not isinstance(schema, dict):
            raise NotExpressible("a schema that allows nothing")
        keywords = schema.keys() - ANNOTATIONS
        if keywords & {"anyOf", "oneOf"}:
            self._add_options(schema, keywords)
            return
        types = types_of(schema, self.root)
        values = _values(schema)
        if "null" in types if values is None else None in values:
            self.texts.append(self.null)
        if not types & {"string", "any"}:
            return None
        if keywords - (OF_TEXTS if values is None else OF_VALUES):
            raise NotExpressible("keywords of strings")
        if values is None:
            self.texts.append(self._free(schema.get("minLength", 0), schema.get("maxLength")))
        else:
            self.texts += [self._literal(value) for value in values if isinstance(value, str)]

    def _add_options(self, schema: dict[str, Any], keywords: set[str]) -> None:
        options = schema.get("anyOf") or schema.get("oneOf")
        if len(keywords) > 1 or not isinstance(options, list):
            raise NotExpressible("options beside other keywords")
        text_types = {"string", "null", "any"}
        types = [kind for option in options for kind in types_of(option, self.root) & text_types]
        if "oneOf" in keywords and ("any" in types or len(types) > len({*types})):
            raise NotExpressible("values for which more than one option may be true")
        for option in options:
            self.add(option)

    def _literal(self, value: str) -> str:
        if value.strip() in NULLS or self.end in value:
            raise NotExpressible("a value that would be read as another")
        return quoted(f"{value}{self.line}{self.end}")

    def _free(self, min_length: Any, max_length: Any) -> str:
        end = self.end.replace("/", r"\/")
        if not min_length and max_length is None:
            return f"/(?s:.)*{end}/"
        is_range = isinstance(min_length, int) and isinstance(max_length, int | None)
        if not is_range or min_length < 0 or (max_length is not None and max_length < min_length):
            raise NotExpressible("lengths that are none")
        # Not lazily alone: an end tag before `min_length` characters would not end the match.
        last = r"\n" if self.line else ""
        max_length = "" if max_length is None else max_length
        return rf"/(?s:.){{{min_length},{max_length}}}{last}{end}/ & ~/(?s:.)*{end}(?s:.)+/"


def _reference(schema: Any) -> str | None:
    """Return the `$ref` of a schema that has nothing else, or only pydantic's `allOf` around it."""
    if isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"allOf"}:
        options = schema["allOf"]
        schema = options[0] if isinstance(options, list) and len(options) == 1 else None
    is_reference = isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}
    return str(schema["$ref"]) if is_reference else None


def _find(root: Any, reference: str) -> Any:
    if not reference.startswith("#"):
        return None
    for key in unquote(reference[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            is_index = key.isdecimal() and len(key) < 10 and int(key) < len(root)
            root = root[int(key)] if is_index else None
        else:
            root = root.get(key) if isinstance(root, dict) else None
    return root


def _values(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None
