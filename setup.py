"""The CPU kernels, once per instruction set; everything else about the package is in
pyproject.toml.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("servd/worker/ops/cpu")
# What a CPU has decides which one is loaded (servd/worker/ops/native.py). Tuned for no CPU in
# particular, GCC 14 splits some fused products of 256 bits, by the form of the loop: the same sum
# would get other last bits in another tile.
X86 = {
    "amx": [
        "-march=x86-64-v4",
        "-mprefer-vector-width=512",
        "-mavx512bf16",
        "-mavx512vnni",
        "-mamx-tile",
        "-mamx-bf16",
        "-mamx-int8",
    ],  # fmt: skip
    "bf16": [
        "-march=x86-64-v4",
        "-mprefer-vector-width=512",
        "-mavx512bf16",
        "-mavx512vnni",
    ],  # fmt: skip
    "vnni": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512vnni"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avxvnni": ["-march=x86-64-v3", "-mtune=haswell", "-mavxvnni"],
    "avx2": ["-march=x86-64-v3", "-mtune=haswell"],
    "generic": [],
}
ARM = {
    "i8mm": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
    "dotprod": ["-march=armv8.2-a+dotprod"],
    "generic": [],
}
# What /proc/cpuinfo must list for a variant: the conditions of servd_is_usable in cpu/graph.cpp
# and of native.py.
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
FLAGS = {
    "amx": AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "bf16": AVX512 | {"avx512_vnni", "avx512_bf16"},
    "vnni": AVX512 | {"avx512_vnni"},
    "avx512": AVX512,
    "avxvnni": AVX2 | {"avx_vnni"},
    "avx2": AVX2,
    "i8mm": {"asimddp", "i8mm", "bf16"},
    "dotprod": {"asimddp"},
    "generic": set(),
}


def target_machine() -> str:
    """Return the kind of machine to compile for: that of CXX, which may be a cross compiler."""
    command = [*os.environ.get("CXX", "").split(), "-dumpmachine"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
    return printed.split("-")[0]


VARIANTS = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}.get(
    target_machine(), {"generic": []}
)
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))
# A library says what it was compiled from: one of another state is not used (native.py).
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]


def may_use_tiles() -> bool:
    """Ask Linux for the tiles of AMX, as servd_is_usable does."""
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


def native_variant(cpuinfo: str, may_use_tiles: Callable[[], bool]) -> str:
    """Return the variant that native.py would choose on a CPU."""
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    values = {name.strip(): value.split() for name, value in fields.items()}
    flags = set(values.get("flags", values.get("Features", [])))
    is_amd = values.get("vendor_id") == ["AuthenticAMD"]
    for name in VARIANTS:
        if not FLAGS[name] <= flags:
            continue
        if name == "amx" and not may_use_tiles():
            continue
        if name == "bf16" and not is_amd:
            continue
        return name
    return "generic"


def chosen_variants() -> list[str]:
    """Return the variants that SERVD_KERNELS asks for; without it, all."""
    wanted = os.environ.get("SERVD_KERNELS", "all")
    if wanted not in ("all", "native", "none"):
        sys.exit(f"SERVD_KERNELS={wanted}: must be all, native or none")
    if wanted == "none" or sys.platform not in ("linux", "darwin"):
        return []
    if sys.platform == "darwin":  # every Mac with an Arm CPU has the dot products
        return ["dotprod"] if "dotprod" in VARIANTS else []
    if wanted == "native":
        return [native_variant(Path("/proc/cpuinfo").read_text(), may_use_tiles)]
    return list(VARIANTS)


class Build(build_ext):
    """Without a compiler servd is installed all the same, and uses the slower operations of
    torch.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = len(VARIANTS)  # threads that wait for the sources of a variant

    def build_extensions(self) -> None:
        """Compile as many sources at once as there are CPUs."""
        compile_sources = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as pool:

            def compile_each(sources: list[str], **options: Any) -> list[str]:
                compiled = pool.map(lambda source: compile_sources([source], **options), sources)
                return [name for names in compiled for name in names]

            self.compiler.compile = compile_each
            super().build_extensions()

    def build_extension(self, ext: Any) -> None:
        build = copy(self)
        build.build_temp = str(Path(self.build_temp, ext.name))  # each variant its own object files
        build_ext.build_extension(build, ext)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # of no version of Python

    def get_export_symbols(self, ext: Any) -> list[str]:
        return ext.export_symbols  # loaded by ctypes: there is no PyInit function


class Wheel(bdist_wheel):
    """The libraries depend on the machine and not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            f"servd.worker.ops._{name}",
            # What takes longest first.
            sources=sorted(
                (str(path) for path in SOURCES if path.suffix == ".cpp"),
                key=os.path.getsize,
                reverse=True,
            ),
            depends=["setup.py", *(str(path) for path in SOURCES if path.suffix == ".h")],
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-pthread",
                "-fno-math-errno",
                "-g0",
                "-Wno-uninitialized",  # of headers of GCC 12
                "-Wno-maybe-uninitialized",
                *VARIANTS[name],
                *os.environ.get("CXXFLAGS", "").split(),  # last: the later flag wins
            ],
            define_macros=[("SERVD_STATE", f'"{STATE}"')],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name in chosen_variants()
    ],
)
