"""Tools of deployment, which tests/deploy/install.sh downloads."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.limits import WAIT_SECONDS

TOOLS = Path(__file__).parent / ".tools"
Run = Callable[..., subprocess.CompletedProcess[str]]


def make_runner(program: str) -> Run:
    """Return a function that runs a program. Skip the test if there is none."""
    path = shutil.which(program, path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"there is no {program}: tests/deploy/install.sh downloads it")

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path, *arguments], input=stdin, capture_output=True, text=True, timeout=WAIT_SECONDS
        )

    return run


@pytest.fixture(scope="session")
def promtool() -> Run:
    return make_runner("promtool")


@pytest.fixture(scope="session")
def helm() -> Run:
    return make_runner("helm")
