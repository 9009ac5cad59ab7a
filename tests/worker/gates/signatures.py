"""What steps launch, as a compiler sees it: the kernel, the types of its arguments, which of them
are multiples of 16, and its constants. Triton compiles a kernel for each of these once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
REPORT = Path(__file__).with_name("compile.py")


def signature_of(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A launch as data."""
    options = {name: arguments[name] for name in arguments if name not in kernel.arg_names}
    constants: dict[str, Any] = {}
    types: dict[str, str] = {}
    aligned: list[str] = []
    for name in kernel.arg_names:
        value = arguments[name]
        is_specialized = name not in (kernel.kwargs.get("do_not_specialize") or ())
        if "constexpr" in str(kernel.fn.__annotations__.get(name, "")) or value is None:
            constants[name] = getattr(value, "value", value)
        elif isinstance(value, Tensor):
            types[name] = TYPES[value.dtype]
            if value.storage_offset() * value.itemsize % 16 == 0:
                aligned.append(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and is_specialized:
            constants[name] = 1
        else:
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and is_specialized:
                aligned.append(name)
    return {
        "kernel": f"{kernel.fn.__module__}.{kernel.fn.__name__}",
        "types": types,
        "constants": constants,
        "aligned": aligned,
        "options": options,
    }


class Signatures:
    """The signatures of all launches that it sees, by their texts. `runs`: whether they run."""

    def __init__(self, runs: bool = False) -> None:
        self.runs = runs
        self.by_text: dict[str, dict[str, Any]] = {}

    def launch(self, kernel: Any, arguments: dict[str, Any], run: Callable[[], object]) -> None:
        signature = signature_of(kernel, arguments)
        self.by_text.setdefault(json.dumps(signature, sort_keys=True), signature)
        if self.runs:
            run()


def compile_all(signatures: list[dict[str, Any]], capability: int, cache: Path) -> list[Any]:
    """What became of each, in a process where Triton is not told to interpret."""
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]),
    }
    command = [sys.executable, str(REPORT), str(capability)]
    done = subprocess.run(
        command, env=env, input=json.dumps(signatures), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
