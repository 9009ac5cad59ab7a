"""Write the pages of docs/ that the code already says: `python -m tools.docs`, or with --check only
compare.

Options from servd/config/, routes, errors and metrics from the code that has them, the table of
fields in http.md from the requests, that of monitoring.md from docker/alerts.yaml, limits from the
constants, versions.md from pyproject.toml; speed.svg from a table of benchmarks/peers.md,
docker/grafana/boards from boards.py, and the options in the schema of the Helm chart's values.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import typing
from pathlib import Path

import msgspec

from servd.api.protocol.generation import GenerationRequest
from servd.base.bounds import INT32_MAX, INT64_MAX
from servd.config import Config, choices, descriptions, title_of
from servd.config._section import plain
from servd.config.flag_aliases import ALIASES, IGNORED
from servd.messages.params import SamplingParams
from tools import boards, limits, reference, speed, versions

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CHART_SCHEMA = ROOT / "docker/helm/servd/values.schema.json"

FIELDS_START = "<!-- Generated from servd/api/protocol by `make docs`; changes here are lost. -->"
ALERTS_START = reference.NOTICE.format(source="docker/alerts.yaml")
TABLE_END = "<!-- The end of the table. -->"
# Fields whose default is not that of SamplingParams.
DEFAULTS = {
    "max_tokens": "see below",
    "model": "the served model",
    "priority": 0,
    "return_progress": False,
    "seed": "random",
    "stream": False,
    "timings_per_token": False,
    "use_beam_search": False,
}

CONFIG_HEAD = """\
# Options

<!-- Generated from servd/config/ by `make docs`; changes here are lost. -->

You can give every option as a flag of `servd serve`, as a key of a `--config` file (`.toml`,
`.yaml` or `.json`, with dashes or underscores), or as a keyword of `servd.LLM`. A flag wins over
the file. `servd serve --help` shows the common options, and `--help-all` shows all.

```toml
# servd.toml: servd serve --config servd.toml
model = "Qwen/Qwen3-0.6B"
host = "0.0.0.0"
max-num-seqs = 32
kv-cache-memory = "2GiB"
```

- **Switches.** For a switch that is on, the tables have the flag that turns it off: `--no-...`. The
  description says what the switch does while it is on.
- **Defaults.** If the column is empty, the description has the default, or the option is not set.
- **From vLLM.** Options have vLLM's names where the meaning is equal. servd also accepts vLLM's
  other spellings (`-tp`, `--model`, `--dtype half`, `--max-model-len 8k`). It logs flags that it
  does not need, and rejects others, mostly with a replacement ([vLLM](../how-to/from-vllm.md)).
"""


def config_page() -> str:
    """docs/reference/options.md."""
    parts = [CONFIG_HEAD]
    for section in msgspec.structs.fields(Config):
        parts.append(f"\n## {title_of(section.type)}\n\n")
        parts.append("| flag | values | default | |\n|---|---|---|---|\n")
        for option in msgspec.structs.fields(section.type):
            parts.append(config_row(option))
    return "".join(parts)


def config_row(option: msgspec.structs.FieldInfo) -> str:
    """One line of a table."""
    kind, metas = plain(option.type)
    default = (
        option.default if option.default is not msgspec.NODEFAULT else option.default_factory()
    )
    flag = option.name.replace("_", "-")
    match option.name, default:
        case "model", _:
            flag = "MODEL"
        case _, True:
            flag = f"--no-{flag}"
        case _:
            flag = f"--{flag}"
    match default:
        case None | []:
            text = ""
        case True | False:
            text = "on" if default else "off"
        case _:
            text = f"`{default}`"
    description = descriptions()[option.name].replace("|", "\\|")
    names = [f"`{choice}`" for choice in choices(option.type)]
    allowed = ", ".join(names) or values(kind, metas)
    return f"| `{flag}` | {allowed} | {text} | {description} |\n"


def values(kind: object, metas: list[msgspec.Meta]) -> str:
    """What may be given, in words: `integer, 1 to 256`."""
    if typing.get_origin(kind) is list:
        return "texts"
    words = {bool: "switch", int: "integer", float: "number", str: "text"}.get(kind, "JSON")
    bound = {
        name: value
        for m in metas
        for name in ("ge", "gt", "le", "lt")
        if (value := getattr(m, name)) is not None
    }
    limits = []
    for name, word in (("ge", "from"), ("gt", "above"), ("le", "to"), ("lt", "below")):
        if name in bound:
            limits.append(f"{word} {bound[name]}")
    if "ge" in bound and "le" in bound:
        limits = [f"{bound['ge']} to {bound['le']}"]
    return ", ".join(part for part in (words, " ".join(limits)) if part)


def fields_table() -> str:
    """The fields that chats and completions share, those of one meaning in a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    neutral = SamplingParams()
    for name, description in GenerationRequest.descriptions().items():
        default = DEFAULTS.get(name, getattr(neutral, name, None))
        match default:
            case None | [] | {}:
                text = ""
            case bool():
                text = str(default).lower()
            case float():
                text = f"{default:g}"
            case _:
                text = str(default)
        rows.setdefault((text, bounds_of(name), description), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(["| field | default | bounds | |", "|---|---|---|---|", *lines])


def bounds_of(name: str) -> str:
    """What a sampling parameter may be, in words: `0 to 100`, `up to 16`."""
    hint = typing.get_type_hints(SamplingParams, include_extras=True).get(name, bool)
    schema = msgspec.json.schema(hint)
    for option in schema.get("anyOf", [schema]):
        maximum = option.get("maximum", option.get("maxItems", option.get("maxProperties")))
        minimum = option.get("minimum", option.get("exclusiveMinimum"))
        if maximum in (INT32_MAX, INT64_MAX):
            return f"from {minimum}" if option["minimum"] >= -1 else "64 bits"
        if minimum is not None and maximum is not None and option["type"] in ("integer", "number"):
            return (
                f"above {minimum}, to {maximum}"
                if "exclusiveMinimum" in option
                else f"{minimum} to {maximum}"
            )
        if maximum is not None:
            return f"up to {maximum}"
    return ""


def chart_schema() -> str:
    """The schema of the chart's values, with servd's options in `servdConfig`: each may have dashes
    or underscores, and the names of other servers work, too.
    """
    schema = json.loads(CHART_SCHEMA.read_text(encoding="utf8"))
    sections = [section.type for section in msgspec.structs.fields(Config)]
    names = {option.name for section in sections for option in msgspec.structs.fields(section)}
    names |= ALIASES.keys() | {name.removesuffix("=") for name in IGNORED}
    schema["properties"]["servdConfig"] = {
        "type": "object",
        "$comment": "Generated from servd/config/ by `make docs`; changes here are lost.",
        "patternProperties": {f"^{name.replace('_', '[-_]')}$": {} for name in sorted(names)},
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=1) + "\n"


def fill_in(page: str, start: str, table: str) -> str:
    """Return a written page of docs/ with its generated table."""
    text = (DOCS / page).read_text(encoding="utf8")
    before, found_start, table_and_after = text.partition(start)
    _, found_end, after = table_and_after.partition(TABLE_END)
    assert found_start and found_end, f"{page} has no place for its table"
    return f"{before}{start}\n\n{table}\n\n{TABLE_END}{after}"


def pages() -> dict[Path, str]:
    """Path -> what it should hold."""
    return {
        DOCS / "reference/options.md": config_page(),
        DOCS / "reference/http.md": fill_in("reference/http.md", FIELDS_START, fields_table()),
        DOCS / "how-to/monitoring.md": fill_in(
            "how-to/monitoring.md", ALERTS_START, reference.alerts_table()
        ),
        DOCS / "reference/limits.md": limits.page(),
        DOCS / "reference/routes.md": reference.routes_page(),
        DOCS / "reference/errors.md": reference.errors_page(),
        DOCS / "reference/metrics.md": reference.metrics_page(),
        DOCS / "reference/versions.md": versions.page(),
        DOCS / "images/speed.svg": speed.draw(),
        CHART_SCHEMA: chart_schema(),
        **{ROOT / "docker/grafana/boards" / name: text for name, text in boards.boards().items()},
    }


def main() -> int:
    """Write or compare; 1 if --check found a page that is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is not current"
    )
    check = parser.parse_args().check
    logging.disable()  # the page of errors makes some, which are logged
    stale = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf8") != text
    ]
    for path in stale:
        print(f"{'not current' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(pages()[path], encoding="utf8")
    if check and stale:
        print("run `make docs`")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
