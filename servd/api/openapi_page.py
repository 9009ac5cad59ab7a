"""An OpenAPI document as one HTML page without scripts, which needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
h2 { margin-top: 2em; }
summary { cursor: pointer; padding: .3em 0; }
code { font-size: 13px; }
pre { overflow-x: auto; }
details > div { margin: 0 0 1em 1.2em; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2em .6em; }
td { border-bottom: 1px solid #8884; }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<style>{STYLE}</style>"
)
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} keys",
    "pattern": "matches {}",
}


def page(document: Mapping[str, Any]) -> str:
    return "".join(_page(document))


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f"{HEAD}<title>{title}</title></head><body><h1>{title}</h1>"
    yield f"<p>{escape(info['description'])}</p>"
    yield '<p>The same as JSON: <a href="/openapi.json">/openapi.json</a></p>'
    if schemes := document["components"]["securitySchemes"]:
        yield f"<p>An API key is needed, in one of these forms: {escape(', '.join(schemes))}.</p>"
    yield "<h2>Routes</h2>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(method, path, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3>'
        yield from _schema(schema)
    yield "</body></html>"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><code>{method.upper()} {escape(path)}</code> "
    yield f"{escape(operation['summary'])}</summary><div>"
    yield f"<p>{escape(operation.get('description', ''))}</p><table>"
    for parameter in operation.get("parameters", ()):
        kind = _type(parameter["schema"])
        yield f"<tr><td><code>{escape(parameter['name'])}</code>, in the {parameter['in']}</td>"
        yield f"<td>{kind}</td></tr>"
    if body := operation.get("requestBody"):
        yield f"<tr><td>body</td><td>{_contents(body['content'])}</td></tr>"
    for status, response in operation["responses"].items():
        yield f"<tr><td>{status}</td><td>{escape(response['description'])} "
        yield f"{_contents(response['content'])}</td></tr>"
    yield "</table></div></details>"


def _contents(contents: Mapping[str, Any]) -> str:
    shown = (
        f"<code>{escape(name)}</code>: {_type(content.get('schema') or content['itemSchema'])}"
        for name, content in contents.items()
    )
    return "; or ".join(shown)


def _schema(schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"<p>{escape(schema.get('description', ''))}</p>"
    if "properties" not in schema:
        yield f"<p>{_type(schema)}</p>"
        return
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    for name, value in schema["properties"].items():
        is_required = name in schema.get("required", ())
        has_default = value.get("default") is not None
        note = "required" if is_required else f"default {value['default']}" if has_default else ""
        described = escape(value.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code></td><td>{_type(value)}</td>"
        yield f"<td>{escape(note)} {described}</td></tr>"
    yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(option) for option in schema[key])
    if "const" in schema or "enum" in schema:
        return escape(" | ".join(map(str, schema.get("enum", [schema.get("const")]))))
    if "contentSchema" in schema:
        return f"{_type(schema['contentSchema'])} as JSON text"
    kind = escape(str(schema.get("type", "any")))
    if schema.get("type") == "array":
        kind = f"list of ({_type(schema.get('items', {}))})"
    elif schema.get("type") == "object" and "properties" in schema:
        fields = (f"{escape(name)}: {_type(v)}" for name, v in schema["properties"].items())
        kind = "{" + ", ".join(fields) + "}"
    bounds = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    return kind + (f" ({escape(', '.join(bounds))})" if bounds else "")
