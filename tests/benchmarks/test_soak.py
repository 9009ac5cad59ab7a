"""The soak test in its short forms: faults, and clients of every kind."""

import subprocess
import sys

import pytest

SHORT = ["--seconds", "5", "--interval", "1", "--faults", "engine killed", "API server killed"]
LONGER = ["--seconds", "30", "--interval", "5"]


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(SHORT, id="5 s"), pytest.param(LONGER, id="30 s", marks=pytest.mark.slow)],
)
def test_a_short_soak_finds_no_problem(arguments: list[str]):
    command = [sys.executable, "-m", "benchmarks.soak", *arguments, "--streams", "9"]
    options = ["--options", "--executor", "fake", "--engine-hang-timeout", "10"]
    result = subprocess.run([*command, *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| streams complete and equal |" in result.stdout
    assert "| engine killed |" in result.stdout
