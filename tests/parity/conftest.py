"""Fixtures of the parity tests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.parity.families import CASES, make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(model_type, variant) -> folder of a tiny checkpoint, made once."""

    @cache
    def get(model_type: str, variant: str) -> Path:
        return make_checkpoint(
            tmp_path_factory.mktemp(model_type), model_type, CASES[model_type][variant]
        )

    return get
