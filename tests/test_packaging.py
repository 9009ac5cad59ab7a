"""What a wheel holds: the type marker and the demo model, and no source of a kernel."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_is_typed_and_has_the_demo_model(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "servd/py.typed",
        "servd/cli/bench/serve.py",
        "servd/demo_model/model.safetensors",
    } <= files
    assert not [name for name in files if name.endswith((".cpp", ".h", ".so"))]
