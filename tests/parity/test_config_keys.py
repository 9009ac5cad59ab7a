"""Every key of transformers' configuration classes: servd follows it, or refuses it by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.parity.families import CASES, ENCODERS, make_any
from tests.parity.oracle import compare

# Keys that classes do not declare and that some models read all the same.
OTHERS = {
    "head_dim": 8,
    "hidden_activation": "relu",
    "is_causal": False,
    "is_decoder": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "layer_norm_eps": 0.5,
    "n_embd": 24,
    "num_experts": 2,
    "num_local_experts": 2,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 77.0,
    "sliding_window": 5,
    "use_sliding_window": True,
    "unknown_key": 1,
}
SIZES = ("vocab_size",)  # transformers' tables would be of another size than the file's


def values_like(value: Any) -> Iterator[Any]:
    """Yield other values of a key's type."""
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
            yield max(value // 2, 1)
        case float():
            yield value * 2 + 0.1
        case str():
            yield "relu"
        case list():
            yield value[::-1]
            yield []
        case dict():
            yield {}
        case _:
            yield True
            yield 2
            yield 0.5


def changes(model_type: str, stated: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield config.json with a key changed, added, null or removed."""
    defaults = transformers.CONFIG_MAPPING[model_type]().to_dict()
    for key in sorted({*defaults, *stated, *OTHERS} - {"model_type", "architectures"}):
        value = stated.get(key, defaults.get(key, OTHERS.get(key)))
        tried = [*values_like(value), None]
        if key in OTHERS:
            tried.append(OTHERS[key])
        for other in tried:
            if other != stated.get(key, ...):
                yield f"{key} {other}", stated | {key: other}
        if key in stated:
            yield f"without {key}", {name: stated[name] for name in stated if name != key}


QUICK = ("llama",)
FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(CASES | ENCODERS)
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_is_followed_as_transformers_does_or_refused(tmp_path: Path, model_type: str):
    folder = make_any(tmp_path, model_type)
    declared = {*transformers.CONFIG_MAPPING[model_type]().to_dict(), "head_dim"}
    written = json.loads((folder / "config.json").read_text())
    stated = {key: value for key, value in written.items() if key in declared}
    (folder / "config.json").write_text(json.dumps(stated))
    assert compare(folder)[0] == "equal"
    wrong: dict[str, str] = {}
    for name, config in changes(model_type, stated):
        (folder / "config.json").write_text(json.dumps(config))
        try:
            outcome, details = compare(folder)
        except Exception as error:
            outcome = "different"
            details = repr(error)
        if outcome == "different":
            wrong[name] = details
    print(*wrong.items(), sep="\n")
    assert not wrong
