"""What a wheel holds and does not, and that the locks have what it asks for."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from servd.api.console import FOLDER, files
from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_is_typed_and_has_the_demo_model_and_the_console(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=WAIT_SECONDS)
    packed = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "servd/py.typed",
        "servd/bench/serve.py",
        "servd/demo_model/model.safetensors",
        "servd/demo_model/eagle3/model.safetensors",
    } <= packed
    console = FOLDER.relative_to(ROOT)
    assert {str(console / name) for name in files()} <= packed
    assert not [name for name in packed if name.endswith((".cpp", ".h", ".so"))]


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("serve", ["otel", "gguf"]),
        ("dev", ["otel", "gguf", "dev"]),
        ("clients", ["otel", "gguf", "dev", "clients"]),
    ],
)
def test_a_lock_has_every_dependency_within_its_bounds(lock, extras):
    """All but torch, whose build depends on the machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        asked += project["project"]["optional-dependencies"][extra]
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([^ ;]+)", text, re.MULTILINE))
    assert "torch" not in pins and not [name for name in pins if name.startswith("nvidia")]
    for requirement in map(Requirement, asked):
        if requirement.name != "torch":
            assert pins[requirement.name] in requirement.specifier, requirement


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_what_an_image_copies_is_in_its_context(image):
    """`.dockerignore` leaves everything out that it does not name."""
    kept = re.findall(r"^!(.*)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    commands = re.findall(
        r"^COPY (?!--)(.*)", (ROOT / f"docker/Dockerfile.{image}").read_text(), re.M
    )
    copied = [name for command in commands for name in command.split()[:-1]]
    assert "requirements/serve.txt" in copied and set(copied) <= set(kept)
