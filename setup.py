"""The CPU kernels, once per instruction set; everything else about the package is in
pyproject.toml.
"""

import hashlib
import os
import platform
import sys
from copy import copy
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
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
    "avx2": ["-march=x86-64-v3", "-mtune=haswell"],
    "generic": [],
}
VARIANTS = X86 if platform.machine() in ("x86_64", "AMD64") else {"generic": []}
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))
# The name of a symbol tells what a library was compiled from: one of another state is not used
# (native.py).
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]


class Build(build_ext):
    """Without a compiler servd is installed all the same, and uses the slower operations of
    torch.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = len(VARIANTS)

    def build_extension(self, ext: Any) -> None:
        build = copy(self)
        build.build_temp = str(Path(self.build_temp, ext.name))  # each variant its own object files
        build_ext.build_extension(build, ext)

    def get_export_symbols(self, ext: Any) -> list[str]:
        return ext.export_symbols  # loaded by ctypes: there is no PyInit function


setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(
            f"servd.worker.ops._{name}",
            sources=[str(path) for path in SOURCES if path.suffix == ".cpp"],
            depends=["setup.py", *(str(path) for path in SOURCES if path.suffix == ".h")],
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-pthread",
                "-fno-math-errno",
                "-g0",
                "-Wno-maybe-uninitialized",
                *flags,
                *os.environ.get("CXXFLAGS", "").split(),  # last: the later flag wins
            ],
            extra_link_args=["-pthread", f"-Wl,--defsym=servd_state_{STATE}=1"],
            optional=True,
        )
        for name, flags in VARIANTS.items()
        if sys.platform == "linux"
    ],
)
