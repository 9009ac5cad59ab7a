"""What a wheel holds: the type marker, the demo model, the console, and no source of a kernel."""

import subprocess
import sys
from pathlib import Path

from servd.api.console import FOLDER, files
from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_is_typed_and_has_the_demo_model_and_the_console(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=WAIT_SECONDS)
    packed = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "servd/py.typed",
        "servd/cli/bench/serve.py",
        "servd/demo_model/model.safetensors",
        "servd/demo_model/eagle3/model.safetensors",
    } <= packed
    console = FOLDER.relative_to(ROOT)
    assert {str(console / name) for name in files()} <= packed
    assert not [name for name in packed if name.endswith((".cpp", ".h", ".so"))]
