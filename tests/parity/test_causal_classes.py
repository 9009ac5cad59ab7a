"""Every causal class of transformers: equal, or refused. Writes docs/reference/models.md."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from servd.base.errors import UnsupportedModel
from servd.checkpoint.multimodal_config import CLASSES
from tests.parity.causal_classes import make
from tests.parity.test_transformers import check

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
HEADING = "## Every causal class of transformers"
EXPLANATION = """\
A test runs a tiny random checkpoint of every class in the mapping `MODEL_FOR_CAUSAL_LM_MAPPING`
of `transformers` {version}, in float32. The lists name each class by its `model_type`.
`make test-slow` repeats the test and writes these lists.
"""
HEADINGS = {
    "equal": "Equal: logits and greedy tokens are those of `transformers`",
    "refused": "Refused: servd does not start, and says why",
    "not tried": "Not tried",
    "differs": "Different tokens: a bug",
    "fails": "Failed with an error: a bug",
}
HAS_FILE = "servd refuses only the class of `transformers`: its own model file runs these models."
HAS_STATE = "A layer keeps a state besides the KV cache: Mamba, linear attention, convolutions."
OWN_POSITIONS = "The class computes positions itself, and does not take them from servd."
NO_SIZES = "config.json has no {} under a name that servd knows."
# Part of an error -> what it means to a reader of the page.
REASONS = {
    "keeps a state that is not a KV cache": HAS_STATE,
    "counts tokens itself": OWN_POSITIONS,
    "counts positions from the padding token": OWN_POSITIONS,
    "none of: max_position_embeddings": NO_SIZES.format("maximum length"),
    "none of: num_attention_heads": NO_SIZES.format("number of attention heads"),
    "none of: num_hidden_layers": NO_SIZES.format("number of layers"),
    "none of: hidden_size": NO_SIZES.format("hidden size"),
    "attention in another type": "Attention runs in another data type than the rest of the model.",
    "decides by the values of tensors": "The values of tensors decide which operations run.",
    "makes attention masks of its own": "The class makes its own attention masks.",
    "neither causal nor a sliding": "The attention mask is neither causal nor a sliding window.",
    "attention with indices": "Attention is sparse: an index selects the tokens.",
    "does not call attention": "The class does not use the attention interface of `transformers`.",
    "transformers does not build it": "`transformers` fails to build the tiny model.",
    "tokens differ from those": "The tokens differ from those of `transformers`; nobody knows why.",
    "parameters are not tiny": "The tiny configuration is too large for the test.",
}


def outcome_of(folder: Path, model_type: str, architecture: str) -> tuple[str, str]:
    """Return what became of a class, and why."""
    try:
        make(folder, model_type, architecture)
    except Exception as error:
        return "not tried", reason_of(error, "The test has no tiny configuration of the class.")
    try:
        check(folder)
    except UnsupportedModel as error:
        if {model_type, f"{model_type}_text"} & CLASSES.keys():
            return "refused", HAS_FILE
        return "refused", reason_of(error)
    except AssertionError as error:
        return "differs", reason_of(error)
    except Exception as error:
        return "fails", reason_of(error)
    return "equal", ""


def reason_of(error: Exception, otherwise: str = "") -> str:
    """Return a sentence about an error; for an unknown error `otherwise`, or its first line."""
    text = str(error).strip() or type(error).__name__
    for part, sentence in REASONS.items():
        if part in text:
            return sentence
    line = text.splitlines()[0].split("cannot run in servd: ")[-1]
    return otherwise or re.sub(r"\S+/config.json", "config.json", line.replace("|", "\\|"))


def architectures() -> Iterator[tuple[str, str]]:
    """model_type and class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            yield model_type, name


def page(rows: list[tuple[str, str, str]]) -> str:
    """Return docs/reference/models.md with these outcomes: model_type, kind and reason."""
    from transformers import __version__

    parts = [PAGE.read_text().partition(HEADING)[0], f"{HEADING}\n\n"]
    parts.append(EXPLANATION.format(version=__version__))
    for kind, title in HEADINGS.items():
        names_by_reason: dict[str, list[str]] = {}
        for model_type, its_kind, reason in sorted(set(rows)):
            if its_kind == kind:
                names_by_reason.setdefault(reason, []).append(f"`{model_type}`")
        if not names_by_reason:
            continue
        parts.append(f"\n### {title}\n\n")
        if kind == "equal":
            names = ", ".join(names_by_reason[""])
            parts.append(textwrap.fill(names, 100, break_on_hyphens=False) + "\n")
            continue
        parts.append("| why | `model_type` |\n|---|---|\n")
        for reason in sorted(names_by_reason, key=lambda reason: -len(names_by_reason[reason])):
            parts.append(f"| {reason} | {', '.join(names_by_reason[reason])} |\n")
    return "".join(parts)


@pytest.mark.parametrize("part", REASONS)
def test_reasons_are_parts_of_messages_of_today(part: str):
    files = [*Path("servd/worker").rglob("*.py"), Path("servd/checkpoint/hf.py")]
    files.append(Path(__file__).with_name("causal_classes.py"))
    fixed = part.removesuffix("indices").partition(":")[0]  # the rest is filled in
    assert any(fixed in re.sub(r'"\s+f?"', "", file.read_text()) for file in files)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_at_least_100_classes_are_equal_and_none_differs(tmp_path: Path):
    rows = [
        (model_type, *outcome_of(tmp_path / f"{model_type}-{name}", model_type, name))
        for model_type, name in architectures()
    ]
    PAGE.write_text(page(rows))
    kinds = [kind for _, kind, _ in rows]
    assert kinds.count("equal") >= 100
    assert "differs" not in kinds and "fails" not in kinds
