"""Plain text values of arguments: the types that a JSON schema allows, and their Lark grammar."""

from typing import Any

from servd.api.output.call_grammar import ANNOTATIONS, NotExpressible, quoted

OF_VALUES = {"type", "enum", "const"}  # keywords that texts can obey
OF_TEXTS = OF_VALUES | {"minLength", "maxLength"}
NULLS = ("null", "None")  # texts that stand for null where a schema allows it


def types_of(schema: Any, root: Any, seen: set[str] | None = None) -> set[str]:
    """Return the JSON types that a schema allows: `string` if it states no type, `any` if it is too
    complex. `root` is the schema to which references refer. `seen` has the references that were
    followed already.
    """
    if (reference := _reference(schema)) is not None:
        seen = set() if seen is None else seen
        if reference in seen:
            return set()
        seen.add(reference)
        target = _find(root, reference)
        return {"any"} if target is None else types_of(target, root, seen)
    if isinstance(schema, dict):
        kind = schema.get("type")
        if isinstance(kind, str):
            return {kind}
        if isinstance(kind, list):
            return {str(one) for one in kind}
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return set().union(*(types_of(option, root, seen) for option in schema[key]))
        if (
            not all(isinstance(value, str) for value in _values(schema) or [])
            or "$ref" in schema
            or "allOf" in schema
        ):
            return {"any"}
    return {"string"}


def texts_of(schema: Any, root: Any, end: str, line: str = "\n") -> list[str]:
    r"""Return Lark literals and regular expressions for the texts that match a schema which allows
    strings. `root` is the schema to which references refer.

    Each text starts after the opening tag and `line` (a line break, or nothing), and includes the
    closing tag `end`. A `line` before `end` is not part of the value. All values are strings, or
    null if the schema allows null. Match regular expressions as lazily as possible. Raises
    NotExpressible: no text matches, or texts cannot be told apart in this way.
    """
    found = _Texts(root, end, line)
    found.add(schema)
    if not found.texts or ("null" in types_of(schema, root) and found.null not in found.texts):
        raise NotExpressible("a string that could not be told from null")
    return found.texts


class _Texts:
    """A collector of the texts that the options of a schema allow."""

    def __init__(self, root: Any, end: str, line: str) -> None:
        self.root = root
        self.end = end
        self.line = line
        self.null = quoted(f"null{line}{end}")
        self.texts: list[str] = []
        self.seen: set[str] = set()

    def add(self, schema: Any) -> None:
        if (reference := _reference(schema)) is not None:
            target = None if reference in self.seen else _find(self.root, reference)
            if target is None:
                raise NotExpressible("a reference to nowhere, or the same one twice")
            self.seen.add(reference)
            return self.add(target)
        schema = {} if schema in (None, True) else schema
        if not isinstance(schema, dict):
            raise NotExpressible("a schema that allows nothing")
        keywords = schema.keys() - ANNOTATIONS
        if keywords & {"anyOf", "oneOf"}:
            return self._add_options(schema, keywords)
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
        known = {"string", "null", "any"}
        types = [kind for option in options for kind in types_of(option, self.root) & known]
        if "oneOf" in keywords and ("any" in types or len(types) > len({*types})):
            raise NotExpressible("values for which more than one option may be true")
        for option in options:
            self.add(option)

    def _literal(self, value: str) -> str:
        if value.strip() in NULLS or self.end in value:
            raise NotExpressible("a value that would be read as another")
        return quoted(f"{value}{self.line}{self.end}")

    def _free(self, least: Any, most: Any) -> str:
        end = self.end.replace("/", r"\/")
        if not least and most is None:
            return f"/(?s:.)*{end}/"
        is_range = isinstance(least, int) and isinstance(most, int | None)
        if not is_range or not 0 <= least <= (least if most is None else most):
            raise NotExpressible("lengths that are none")
        # Not lazily alone: an end tag that comes before `least` characters would not end the match.
        last = r"\n" if self.line else ""
        most = "" if most is None else most
        return rf"/(?s:.){{{least},{most}}}{last}{end}/ & ~/(?s:.)*{end}(?s:.)+/"


def _reference(schema: Any) -> str | None:
    """Return the `$ref` of a schema that has nothing else, or only pydantic's `allOf` around it."""
    if isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"allOf"}:
        options = schema["allOf"]
        schema = options[0] if isinstance(options, list) and len(options) == 1 else None
    is_reference = isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}
    return str(schema["$ref"]) if is_reference else None


def _find(root: Any, reference: str) -> Any:
    if not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        key = key.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _values(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None
