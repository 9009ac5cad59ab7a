"""The facts about an installation and its machine that a bug report needs."""

import platform
import re
from importlib.metadata import version
from pathlib import Path

import servd
from servd.base import plugins
from servd.config.machine import look_at_machine


def describe_installation() -> str:
    """Return a line for each fact. Imports torch, which takes seconds."""
    is_source = Path(servd.__file__).parents[1].joinpath("pyproject.toml").exists()
    library = plugins.load("servd.worker.ops", "native", "library")()
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    num_gpus = look_at_machine().num_gpus
    rows = {
        "servd": f"{servd.__version__}, from {'source' if is_source else 'a wheel'}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": version("torch"),
        "transformers": version("transformers"),
        "platform": platform.platform(),
        "CPU": read_value(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "CPU kernels": library.name if library else "none",
        "GPUs": " ".join([str(num_gpus), *(read_value(card, "Model") for card in cards)]),
    }
    return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


def read_value(file: Path, name: str) -> str:
    """Return the first value of a name in a file of "name: value" lines; "" if there is none."""
    text = file.read_text(errors="replace") if file.exists() else ""
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else ""
