"""Every causal class of transformers: TESTED lists those whose tokens are equal."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from servd.worker.models._transformers_types import TESTED
from tests.parity.causal_classes import make
from tests.parity.test_transformers import check

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"


class EveryType:
    """In place of TESTED, lets every class run."""

    def __contains__(self, model_type: str) -> bool:
        return True


def is_equal(folder: Path, model_type: str, architecture: str) -> bool:
    """Return whether a tiny checkpoint of the class has the logits and tokens of transformers."""
    try:
        make(folder, model_type, architecture)
        check(folder)
    except Exception:  # any error says that the class cannot run
        return False
    return True


def architectures() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each model_type with its classes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        yield model_type, (names,) if isinstance(names, str) else tuple(names)


def test_the_page_lists_the_tested_classes():
    names = PAGE.read_text().strip().rpartition("\n\n")[2]
    assert set(re.findall("`([^`]+)`", names)) == TESTED


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_equal_classes_are_those_of_the_list(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("servd.worker.models._transformers.TESTED", EveryType())
    model_types: set[str] = set()
    equal: set[str] = set()
    for model_type, names in architectures():
        model_types.add(model_type)
        if all(is_equal(tmp_path / f"{model_type}-{name}", model_type, name) for name in names):
            equal.add(model_type)
    assert equal == TESTED & model_types
