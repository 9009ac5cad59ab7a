"""Documentation: generated pages are current, links and flags exist, and the examples run."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from servd import plugins
from servd.cli import make_parser
from servd.config import options_by_name

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/*/*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))

# Flags of other programs that the pages show.
OTHER_FLAGS = {
    "--rm", "--gpus", "--user", "--build-arg", "--build",  # docker
    "--check",  # tools.docs
    "--url", "--concurrency",  # servd run-batch
    "--num-prompts", "--input-len", "--output-len", "--out",  # servd bench
    "--no-deps", "--only-binary", "--python-version", "--implementation", "--platform",  # pip
    "--threads", "--work",  # tools.demo_model.train
    "--parts",  # benchmarks.gpu
}  # fmt: skip


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf8"), re.DOTALL | re.MULTILINE
    )


def test_generated_pages_are_current():
    result = subprocess.run(
        [sys.executable, "-m", "tools.docs", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@every_page
def test_links_resolve(page):
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


@every_page
def test_flags_exist(page):
    code = re.sub(r"https?://\S+", "", page.read_text(encoding="utf8"))
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", code)) - OTHER_FLAGS
    options = {f"--{name.replace('_', '-')}" for name in options_by_name()}
    known = (
        options
        | {f"--no-{flag[2:]}" for flag in options}
        | {"--help", "--config", "--version", "--no"}
    )
    # "docs/config.md" says `--no-...`, for any switch
    assert sorted(flag for flag in flags if flag not in known) == []


def test_every_flag_of_the_command_line_is_documented():
    text = (ROOT / "docs/config.md").read_text(encoding="utf8")
    for name in options_by_name():
        flag = name.replace("_", "-")
        assert name == "model" or re.search(rf"`--(no-)?{flag}`", text), name


def test_the_help_has_every_option_and_its_description(capsys):
    from servd.config import Config

    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(["serve", "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for section in msgspec.structs.fields(Config):
        assert (section.type.__doc__ or "").splitlines()[0].rstrip(".") in shown
    for name in options_by_name():
        assert name == "model" or f"--{name.replace('_', '-')}" in shown


def test_the_index_has_every_page():
    index = (ROOT / "docs/README.md").read_text(encoding="utf8")
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
    assert [name for name in sorted(pages) if f"]({name})" not in index] == []


def test_the_functions_on_the_way_of_a_request_exist():
    """Names in the README's table, such as `Scheduler.schedule`."""
    text = (ROOT / "README.md").read_text(encoding="utf8")
    table = text[text.index("| where | what happens |") : text.index("If a process dies")]
    names = set(re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", table))
    assert len(names) > 8
    defined = set()
    for path in ROOT.glob("servd/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.ClassDef):
                methods = (ast.FunctionDef, ast.AsyncFunctionDef)
                defined |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, methods)}
            elif isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                defined.add(node.name)
    assert sorted(names - defined) == []


def test_the_torch_version_is_the_same_everywhere():
    places = ["Makefile", "README.md", "docker/Dockerfile.cpu", "docs/docker.md"]
    versions = {
        place: set(re.findall(r"torch==([\d.]+\d)", (ROOT / place).read_text())) for place in places
    }
    assert versions == dict.fromkeys(places, {"2.13.0"})


def test_the_documented_default_template_is_the_one_in_use():
    from servd.api.chat_template import DEFAULT_TEMPLATE

    (shown,) = blocks(ROOT / "docs/http.md", "jinja")
    assert shown.strip() == DEFAULT_TEMPLATE.strip()


def test_every_route_and_field_is_documented():
    from servd.api.protocol.chat import ChatCompletionRequest
    from servd.api.protocol.completions import CompletionRequest

    text = (ROOT / "docs/http.md").read_text(encoding="utf8")
    routers = [
        plugins.load("servd.api.routes", name, "router")
        for name in plugins.names("servd.api.routes")
    ]
    for route in (route for router in routers for route in router.routes):
        path = re.sub(r"\{.*\}", "{id}", route.path)
        assert any(f"{method} {path}`" in text for method in route.methods), path
    for_the_record = {"user", "metadata", "store", "service_tier"}  # kept and without effect
    refused = {"best_of", "suffix"}
    fields = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert [
        name for name in sorted(fields - for_the_record - refused) if f"`{name}`" not in text
    ] == []


def test_compose_builds_the_images_that_exist():
    compose = msgspec.yaml.decode((ROOT / "docker/compose.yaml").read_bytes())
    for service in compose["services"].values():
        assert (
            ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]
        ).exists()


# ---- examples ----


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that calls its fake model demo."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "servd",
            "serve",
            "--executor",
            "fake",
            "--port",
            "0",
            "--served-model-name",
            "demo",
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        log = []
        for line in process.stderr:
            log.append(line)
            if match := re.search(r"ready at (http://\S+)", line):
                yield match[1]
                break
        else:
            pytest.fail("the server did not start:\n" + "".join(log))
    finally:
        process.terminate()
        process.wait(timeout=20)
        process.stderr.close()


def run_example(text: str, language: str, **replace: str) -> str:
    """Run a block as its reader would, with some words of it replaced; return what it prints."""
    for old, new in replace.items():
        text = text.replace({"server": "http://localhost:8000", "model": '"gpt2"'}[old], new)
    program = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[
        language
    ]
    result = subprocess.run(
        [*program, text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("text", blocks(ROOT / "README.md", "bash"))
def test_curl_examples(text, url):
    printed = run_example(text, "bash", server=url)
    if '"stream": true' in text:
        events = [line.removeprefix("data: ") for line in printed.splitlines() if line]
        assert events[-1] == "[DONE]"
        parts = [
            choice["text"]
            for event in events[:-1]
            for choice in msgspec.json.decode(event)["choices"]
        ]
        assert len("".join(parts)) == 32  # the fake's tokens are letters
    else:
        answer = msgspec.json.decode(printed)
        assert answer["usage"]["completion_tokens"] == 32
        assert len(answer["choices"][0]["message"]["content"]) == 32


PYTHON_BLOCKS = [
    pytest.param(text, id=f"{page.name}-{i}")
    for page in (ROOT / "README.md", ROOT / "docs/offline.md")
    for i, text in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize("text", PYTHON_BLOCKS)
def test_python_examples(text, request):
    if "localhost:8000" in text:
        printed = run_example(text, "python", server=request.getfixturevalue("url"))
        assert len(printed.strip()) > 0
    else:
        folder = request.getfixturevalue("tiny_gpt2")
        printed = run_example(text, "python", model=f'"{folder}"')
        assert len(printed.splitlines()) >= text.count("print(")
