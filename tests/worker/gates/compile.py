"""Compiles kernels for a GPU that need not be here. Reads signatures from standard input, and
writes for each the registers, spilled bytes and shared memory, and what its instructions are.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}


def compile_for(capability: int, signature: dict[str, Any]) -> dict[str, Any]:
    module, _, name = signature["kernel"].rpartition(".")
    kernel = getattr(importlib.import_module(module), name)
    kinds = {
        argument: signature["types"].get(argument, "constexpr") for argument in kernel.arg_names
    }
    places = {argument: (at,) for at, argument in enumerate(kernel.arg_names)}
    aligned = {places[argument]: [["tt.divisibility", 16]] for argument in signature["aligned"]}
    source = ASTSource(kernel, kinds, signature["constants"], aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=signature["options"])
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        nvidia = triton.knobs.nvidia
        ptxas = getattr(nvidia, "ptxas_blackwell", nvidia.ptxas).path  # the newer of two
        command = [ptxas, "-v", "--gpu-name", ARCHITECTURES[capability], file.name]
        done = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    return {
        "kernel": name,
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "narrow_loads": len(re.findall(r"ld\.global[.\w]*\.[bus](?:8|16) ", ptx)),
        "copies": "cp.async" in ptx,
    }


def main() -> None:
    capability = int(sys.argv[1])
    results = [compile_for(capability, signature) for signature in json.load(sys.stdin)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
