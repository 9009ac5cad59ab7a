"""What a wheel holds, that the locks have what it asks for, and the ways to install servd."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from servd.api.console import FOLDER, files
from servd.base import compat as base_compat
from servd.worker import compat as worker_compat
from servd.worker.ops import native
from tests.limits import WAIT_SECONDS
from tools import versions
from tools.release_notes import find_notes

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_is_typed_and_has_the_demo_model_and_the_console(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=WAIT_SECONDS)
    packed = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "servd/py.typed",
        "servd/bench/serve.py",
        "servd/demo_model/model.safetensors",
    } <= packed
    console = FOLDER.relative_to(ROOT)
    assert {str(console / name) for name in files()} <= packed
    assert not [name for name in packed if name.endswith((".cpp", ".h", ".so"))]


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("serve", ["otel"]), ("dev", ["otel", "dev"]), ("clients", ["otel", "dev", "clients"])],
)
def test_a_lock_has_every_dependency_within_its_bounds(lock, extras):
    """All but torch, whose build depends on the machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        requirements += project["project"]["optional-dependencies"][extra]
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([^ ;]+)", text, re.MULTILINE))
    assert "torch" not in pins and not [name for name in pins if name.startswith("nvidia")]
    for requirement in map(Requirement, requirements):
        if requirement.name != "torch":
            assert pins[requirement.name] in requirement.specifier, requirement


def test_the_tested_versions_are_allowed():
    newest = versions.read_newest()
    requirements = {requirement.name: requirement for requirement in versions.read_requirements()}
    assert newest.keys() == requirements.keys()
    assert all(newest[name] in requirement.specifier for name, requirement in requirements.items())
    for library in ("gguf", "prometheus_client", "torch", "transformers"):
        tested = {**base_compat.TESTED, **worker_compat.TESTED}[library]
        requirement = requirements[library.replace("_", "-")]
        newest_minor = newest[requirement.name].rpartition(".")[0]
        assert tested == f"{versions.oldest(requirement)}-{newest_minor}"


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_what_an_image_copies_is_in_its_context(image):
    """`.dockerignore` leaves everything out that it does not name."""
    kept = re.findall(r"^!(.*)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    commands = re.findall(
        r"^COPY (?!--)(.*)", (ROOT / f"docker/Dockerfile.{image}").read_text(), re.M
    )
    copied = [name for command in commands for name in command.split()[:-1]]
    assert "requirements/serve.txt" in copied and set(copied) <= set(kept)


def test_bake_builds_each_image_from_its_file():
    bake = (ROOT / "docker/bake.hcl").read_text()
    files = set(re.findall(r'^  dockerfile = "(.*)"', bake, re.MULTILINE))
    assert files == {str(path.relative_to(ROOT)) for path in (ROOT / "docker").glob("Dockerfile.*")}


# ---- kernels ----

ZEN_4 = "avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_tile amx_bf16 amx_int8"


def ask_setup_py(expression: str, **environment: str) -> Any:
    """Evaluate an expression in setup.py, in a process of its own: setuptools changes Python."""
    code = f"""
import json, runpy, sys
sys.argv = ["setup.py", "-q", "--name"]
print(json.dumps(eval({expression!r}, runpy.run_path("setup.py"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one variant")
def test_the_native_variant_is_of_the_cpu():
    cases = [
        ("GenuineIntel", SAPPHIRE_RAPIDS, True, "amx"),
        ("GenuineIntel", SAPPHIRE_RAPIDS, False, "vnni"),  # bf16 is slow on Intel's
        ("AuthenticAMD", ZEN_4, False, "bf16"),
        ("GenuineIntel", ZEN_4.removesuffix(" avx512_vnni avx512_bf16"), False, "avx512"),
        ("GenuineIntel", "avx2 fma f16c avx_vnni", False, "avxvnni"),
        ("AuthenticAMD", "avx2 fma f16c", False, "avx2"),
        ("GenuineIntel", "avx2 fma f16c avx512f", False, "avx2"),
        ("GenuineIntel", "avx", False, "generic"),
    ]
    machines = [
        (f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: sse {flags}\n", may_use_tiles)
        for vendor, flags, may_use_tiles, _ in cases
    ]
    variants = ask_setup_py(
        f"[native_variant(info, lambda: tiles) for info, tiles in {machines!r}]"
    )
    assert variants == [variant for *_, variant in cases]


def test_a_cross_compiler_compiles_the_variants_of_its_machine():
    cross = {"CXX": "echo aarch64-linux-gnu"}  # what it prints when it is asked for its machine
    variants = ["i8mm", "dotprod", "generic"]
    assert ask_setup_py("chosen_variants()", **cross, SERVD_KERNELS="all") == variants
    cases = ["fp asimd asimddp i8mm bf16", "fp asimd asimddp i8mm", "fp asimd"]
    machines = [f"processor\t: 0\nFeatures\t: {features}\n" for features in cases]
    code = f"[native_variant(info, lambda: False) for info in {machines!r}]"
    assert ask_setup_py(code, **cross) == variants


@pytest.mark.skipif(native.SWITCH in os.environ, reason="another library is asked for")
def test_the_native_variant_is_loaded():
    """`make serve` compiles it alone."""
    library = native.library()
    if library is None:
        pytest.skip("there are no kernels")
    assert ask_setup_py("chosen_variants()", SERVD_KERNELS="native") == [library.name]


def test_make_test_compiles_what_make_serve_leaves_out(tmp_path):
    def kernels(target: str) -> list[str]:
        command = ["make", "-n", f"VENV={tmp_path}", target]
        plan = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return re.findall(r"SERVD_KERNELS=(\w+)", plan.stdout)

    assert kernels("serve") == ["none", "native"]
    assert kernels("test") == kernels("install") == ["none", "native", "all"]


# ---- wheel and installation ----


@pytest.mark.skipif(sys.platform != "linux", reason="there are no kernels")
def test_a_wheel_without_a_compiler_is_of_no_version_of_python(tmp_path):
    build = ["build", "--build-base", str(tmp_path / "build")]
    wheel = ["bdist_wheel", "-d", str(tmp_path), "--bdist-dir", str(tmp_path / "wheel")]
    environment = os.environ | {"CC": "false", "CXX": "false"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", *build, *wheel],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        timeout=WAIT_SECONDS,
    )
    (path,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-linux_\w+\.whl$", path.name)
    assert path.stat().st_size < 15e6
    names = zipfile.ZipFile(path).namelist()
    assert "servd/cli/__init__.py" in names
    assert not [name for name in names if name.endswith(".so")]


def install_sh(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "install.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_install_sh_knows_its_options():
    usage = install_sh("--help")
    assert usage.returncode == 0
    described = set(re.findall(r"^  (--[\w-]+)", usage.stdout, re.MULTILINE))
    cases = re.findall(r"^    (--[^)]*)\)", (ROOT / "install.sh").read_text(), re.MULTILINE)
    parsed = {name for case in cases for name in re.findall(r"--[\w-]+", case)}
    assert described and described == parsed
    assert install_sh("--nonsense").returncode == 1


@pytest.mark.parametrize("python", ["false", "no-such-python"])
def test_install_sh_refuses_a_python_that_is_too_old(python, tmp_path):
    result = install_sh("--python", python, "--prefix", str(tmp_path / "servd"))
    assert result.returncode == 1 and "3.11" in result.stderr
    assert not (tmp_path / "servd").exists()


def test_install_sh_asks_no_registry_for_servd(tmp_path):
    """The name belongs to another project there."""
    script = shutil.copy(ROOT / "install.sh", tmp_path)
    prefix = tmp_path / "environment"
    command = ["sh", script, "--prefix", str(prefix)]
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    result = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "--from" in result.stderr
    assert not prefix.exists()


def test_install_sh_writes_the_unit_that_the_page_shows():
    page = (ROOT / "docs/how-to/systemd.md").read_text()
    units = re.findall(r"^```text\n(\[Unit\].*?)^```", page, re.DOTALL | re.MULTILINE)
    assert install_sh("--cpu", "--prefix", "/opt/servd", "--print-unit").stdout == units[0]


def test_install_sh_has_the_torch_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    script = (ROOT / "install.sh").read_text()
    for name in ("TORCH", "CPU_TORCH_INDEX"):
        versions = re.findall(rf"^{name} = (.*)", makefile, re.MULTILINE)
        assert re.findall(rf'^{name}="(.*?)"', script, re.MULTILINE) == versions


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck")
def test_install_sh_passes_shellcheck():
    subprocess.run(["shellcheck", "install.sh"], cwd=ROOT, check=True)


def test_the_notes_of_a_release_are_its_part_of_the_changelog():
    changelog = "# Log\n\n## [Unreleased]\n\n## [0.2.0] - 2027\n\n- New.\n\n## [0.1.0]\n- Old.\n"
    assert find_notes(changelog, "0.2.0") == "- New."
    assert find_notes(changelog, "0.1.0") == "- Old."
    for version in ("0.3.0", "Unreleased"):
        with pytest.raises(SystemExit):
            find_notes(changelog, version)
