"""The CPU kernels for aarch64, cross-compiled and run by qemu: by the tests of all kernels, and bit
by bit beside those of this CPU.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from servd.worker.layers.packed import GroupedMatrix, PackedMatrix
from servd.worker.ops import native
from tests.worker.cpu_kernels import EXACT_SUMS
from tests.worker.emulation import EmulatedLibrary, Span
from tests.worker.ops.test_grouped import WHOLE, example
from tests.worker.ops.test_native import ROOT, call_many

COMPILER = "aarch64-linux-gnu-g++"
HEADERS = "/usr/aarch64-linux-gnu"  # and libraries
SERVER = ROOT / "tests/worker/emulation/kernels.cpp"
# What calls kernels but for what starts Triton, forks, or is about the loading of a file.
SUITES = (
    "tests/worker/ops/test_experts.py",
    "tests/worker/ops/test_grouped.py",
    "tests/worker/ops/test_native.py",
    "tests/worker/attention/test_native.py",
    "tests/worker/sample/test_ops.py",
    "tests/worker/quantization/test_int4.py",
    "tests/worker/quantization/test_int8.py",
    "tests/worker/lora/test_layers.py",
)
VARIANTS = ("i8mm", "dotprod", "generic")
LEFT_OUT = "triton or fork or at_once or a_library"

pytestmark = pytest.mark.slow
Build = Callable[[str], Path]


def qemu() -> str | None:
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return a function that compiles the kernels with CXXFLAGS and returns the folder."""
    if platform.machine() != "x86_64":
        pytest.skip("this machine needs no emulator")
    if shutil.which(COMPILER) is None or qemu() is None:
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    tmp = tmp_path_factory.mktemp("aarch64")

    def build(flags: str = "") -> Path:
        folder = tmp / (flags or "plain")
        command = [sys.executable, "setup.py", "-q", "build_ext"]
        command += ["--build-lib", str(folder), "--build-temp", str(folder / "objects")]
        compilers = {"CC": COMPILER.replace("g++", "gcc"), "CXX": COMPILER}
        environment = os.environ | compilers | {"CXXFLAGS": flags, "SERVD_KERNELS": "all"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
        return folder / "servd/worker/ops"

    return build


@pytest.fixture(scope="module")
def folder(build: Build) -> Path:
    return build("")


@pytest.fixture(scope="module")
def emulator(build: Build, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    server = tmp_path_factory.mktemp("server") / "kernels"
    subprocess.run(
        [COMPILER, "-O1", "-std=c++17", str(SERVER), "-o", str(server), "-ldl"], check=True
    )
    return [qemu() or "", "-L", HEADERS, "-cpu", "max", str(server)]


@pytest.fixture
def load(emulator: list[str]) -> Iterator[Callable[[Path], EmulatedLibrary]]:
    loaded: list[EmulatedLibrary] = []

    def load(path: Path, cpu: str = "max") -> EmulatedLibrary:
        command = [cpu if word == "max" else word for word in emulator]
        loaded.append(EmulatedLibrary(path, command))
        return loaded[-1]

    yield load
    for library in loaded:
        library.close()


@pytest.mark.parametrize(
    ("cpu", "usable"),
    [
        ("cortex-a72", {"generic"}),
        ("neoverse-n1", {"generic", "dotprod"}),
        ("max", {"generic", "dotprod", "i8mm"}),
    ],
)
def test_a_cpu_uses_the_kernels_of_instructions_that_it_has(cpu, usable, folder, load):
    assert {path.name for path in folder.glob("*.so")} == {f"_{name}.so" for name in VARIANTS}
    assert {name for name in VARIANTS if load(folder / f"_{name}.so", cpu).is_usable} == usable


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_pass_the_tests_of_all_kernels(name, folder, emulator):
    environment = os.environ | {
        "SERVD_EMULATED": str(folder / f"_{name}.so"),
        "SERVD_EMULATOR": " ".join(emulator),
    }
    plugin = ["-p", "tests.worker.emulation", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin, "-k", f"not ({LEFT_OUT})", *SUITES]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=550, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) > 300


class Twins:
    """A library here and one that is emulated: each graph is run by both."""

    def __init__(self, here: native.Library, emulated: EmulatedLibrary) -> None:
        self.here = here
        self.emulated = emulated
        self.compared: set[str] = set()
        self.different: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.emulated, name)

    def run(self, graph: bytes) -> None:
        kernels = set(self.emulated.names_in(graph))
        spans = self.emulated.spans_in(graph)
        before = contents_of(spans)
        self.emulated.run(graph)
        emulated = contents_of(spans)
        for (begin, _), content in zip(spans, before, strict=True):
            ctypes.memmove(begin, content, len(content))
        self.here.run(graph)
        self.compared |= kernels
        if contents_of(spans) != emulated:
            self.different |= kernels


def contents_of(spans: list[Span]) -> list[bytes]:
    return [ctypes.string_at(begin, end - begin) for begin, end in spans]


def test_without_fused_products_every_kernel_has_the_bits_of_x86(
    build, load, tiny_llama, monkeypatch
):
    """The generic kernels have vectors of one width on both. Those of x86 have no fused product."""
    monkeypatch.setenv(native.SWITCH, "generic")
    native.library.cache_clear()
    here = native.library()
    native.library.cache_clear()
    if here is None:
        pytest.skip("the generic kernels are not compiled here")
    twins = Twins(here, load(build("-ffp-contract=off") / "_generic.so"))
    monkeypatch.setattr(native, "library", lambda: twins)
    call_many(tiny_llama)
    assert twins.compared >= here.signatures.keys() - {"set_threads"}
    assert twins.different == set()


@pytest.mark.parametrize("name", ["i8mm", "dotprod"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
def test_sums_of_integers_have_the_bits_of_this_cpu(name, x_dtype, folder, load, monkeypatch):
    here = native.library()
    if here is None or here.name not in EXACT_SUMS:
        pytest.skip("this CPU has no kernels with sums of integers")
    generator = torch.Generator().manual_seed(0)

    def products() -> list[Tensor]:
        results = []
        for shape in ((33, 20), (100, 1024), (50, 2500)):
            codes = torch.randint(-127, 128, shape, generator=generator.manual_seed(shape[1]))
            x = torch.randn(29, shape[1], generator=generator)
            packed = PackedMatrix(codes.to(torch.int8), torch.rand(shape[0]).add(1), x_dtype)
            packed.scale = torch.linspace(0.1, 1, shape[0])
            results.append(packed.multiply(x, torch.linspace(-1, 1, shape[0])))
        for case in WHOLE:
            packed = GroupedMatrix(example(*case), x_dtype)
            x = torch.randn(29, case[0][1], generator=generator.manual_seed(case[0][1]))
            results.append(packed.multiply(x, None))
        return results

    expected = products()
    emulated = load(folder / f"_{name}.so")
    monkeypatch.setattr(native, "library", lambda: emulated)
    for got, product in zip(products(), expected, strict=True):
        assert torch.equal(got, product)
