"""The official JSON-Schema tests, draft 2020-12: outputs validate, instances are told apart."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from servd.core.structured_output.grammar import Grammar, GrammarError
from tests.core.structured_output.driver import EOS, compile_grammar, random_output

DEFAULT = Path(__file__).resolve().parents[4] / "shared/data/json-schema-test-suite"
SUITE = Path(os.environ.get("JSON_SCHEMA_TEST_SUITE", DEFAULT)) / "draft2020-12"
NUM_OUTPUTS = 6  # per schema

if not SUITE.is_dir():
    pytest.skip(
        f"no JSON-Schema test suite at {SUITE} (set JSON_SCHEMA_TEST_SUITE)",
        allow_module_level=True,
    )

GROUPS: list[dict[str, Any]] = [
    group
    for file in sorted(SUITE.glob("*.json"))
    for group in json.loads(file.read_text(encoding="utf8"))
]


def compile_schema(schema: Any) -> Grammar | None:
    """None if the schema is refused."""
    try:
        grammar = compile_grammar("json", json.dumps(schema))
        grammar.matcher().bitmask()
    except GrammarError as error:
        assert str(error)
        return None
    return grammar


@pytest.fixture(scope="module")
def accepted() -> list[tuple[dict[str, Any], Grammar]]:
    return [
        (group, grammar)
        for group in GROUPS
        if (grammar := compile_schema(group["schema"])) is not None
    ]


def matches(grammar: Grammar, value: Any) -> bool:
    matcher = grammar.matcher()
    try:
        for token_id in [*json.dumps(value, ensure_ascii=False).encode(), EOS]:
            matcher.accept(token_id)
    except GrammarError:
        return False
    return True


def test_most_of_the_suite_is_supported(accepted):
    assert (
        len(accepted) / len(GROUPS) > 0.4
    )  # the rest is refused by name: not, if, unevaluated..., $dynamicRef


def test_every_output_validates(accepted):
    num_outputs = 0
    for group, grammar in accepted:
        schema = group["schema"]
        if re.search(r"\\p\{", json.dumps(schema).replace("\\\\", "\\")):
            continue  # the validator's regular expressions know no \p{...}
        validator = jsonschema.Draft202012Validator(schema)
        for seed in range(NUM_OUTPUTS):
            if (output := random_output(grammar, seed)) is not None:
                num_outputs += 1
                assert validator.is_valid(json.loads(output)), (group["description"], output)
    assert num_outputs > 2 * len(accepted)


def test_invalid_instances_are_refused(accepted):
    let_through = [
        (group["description"], test["description"])
        for group, grammar in accepted
        for test in group["tests"]
        if not test["valid"] and matches(grammar, test["data"])
    ]
    assert let_through == []


def test_nearly_all_valid_instances_can_be_generated(accepted):
    """Where not, the grammar is stricter than the schema: order of keys, `format`, 1.0 for 1."""
    valid = [
        (group, test, matches(grammar, test["data"]))
        for group, grammar in accepted
        for test in group["tests"]
        if test["valid"]
    ]
    assert sum(ok for *_, ok in valid) / len(valid) > 0.9
