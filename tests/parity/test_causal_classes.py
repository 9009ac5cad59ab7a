"""Every causal class of transformers: equal, or refused. Writes docs/reference/models.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from servd.base.errors import DifferentTokens, UnsupportedModel
from servd.checkpoint.multimodal_config import CLASSES
from servd.worker.models._transformers import DIFFERENT
from tests.parity.causal_classes import make
from tests.parity.test_transformers import check

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
HEADING = "## Every causal class of transformers"
EXPLANATION = """\
A test serves a tiny random checkpoint of each class of `MODEL_FOR_CAUSAL_LM_MAPPING` in float32,
through `transformers`.

- *equal*: logits and greedy tokens are those of `transformers`, in chunked, mixed, cached and
  restarted requests.
- *refused*: servd refuses the class with this reason. Some run with a model file of servd.
- *denied*: the tokens differ, so servd refuses the class.
- *fails*: servd ends with this error.
- *not tried*: the test has no tiny configuration of the class.

`make test-slow` writes this table. With transformers {version}: {counts}.
"""


def outcome_of(folder: Path, model_type: str, architecture: str) -> tuple[str, str]:
    """What became of a class, and why."""
    try:
        make(folder, model_type, architecture)
    except Exception as error:
        return "not tried", _first_line(error)
    try:
        check(folder)
    except DifferentTokens as error:  # known, and no reason
        return "denied", _first_line(error)
    except UnsupportedModel as error:
        why = _first_line(error).split("cannot run in servd: ")[-1]
        has_file = {model_type, f"{model_type}_text"} & CLASSES.keys()
        return "refused", why + "; servd has a file for it" * bool(has_file)
    except AssertionError as error:
        return "differs", _first_line(error)
    except Exception as error:
        return "fails", _first_line(error)
    return "equal", ""


def _first_line(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"\S+/config.json", "config.json", line.replace("|", "\\|"))[:160]


def architectures() -> Iterator[tuple[str, str]]:
    """model_type and class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            yield model_type, name


def page(rows: list[tuple[str, str, str, str]]) -> str:
    """docs/reference/models.md with this table."""
    from transformers import __version__

    kinds = [row[2] for row in rows]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds)))
    table = "\n".join(f"| `{n}` | `{t}` | {kind} | {why} |" for t, n, kind, why in sorted(rows))
    return (
        PAGE.read_text().partition(HEADING)[0]
        + f"{HEADING}\n\n{EXPLANATION.format(version=__version__, counts=counts)}\n"
        + f"| class | model_type | | why |\n|---|---|---|---|\n{table}\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_at_least_100_classes_are_equal_and_none_differs(tmp_path: Path):
    rows = [
        (model_type, name, *outcome_of(tmp_path / f"{model_type}-{name}", model_type, name))
        for model_type, name in architectures()
    ]
    PAGE.write_text(page(rows))
    kinds = [row[2] for row in rows]
    assert kinds.count("equal") >= 100
    assert "differs" not in kinds and "fails" not in kinds
    assert {row[1] for row in rows if row[2] == "denied"} <= {*DIFFERENT}
