"""Fixtures of the tests of models that see."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.vision_models import make


@pytest.fixture(scope="session")
def vision_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of a tiny checkpoint, made once."""

    @cache
    def get(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        make(family, folder)
        return folder

    return get
