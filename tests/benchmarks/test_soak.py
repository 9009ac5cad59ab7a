"""The soak test in its short form: faults, and clients of every kind, for half a minute."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_short_soak_finds_no_problem():
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "30", "--interval", "5"]
    options = ["--options", "--executor", "fake", "--engine-hang-timeout", "10"]
    result = subprocess.run([*command, "--streams", "9", *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| streams complete and equal |" in result.stdout
    assert "| engine killed |" in result.stdout
