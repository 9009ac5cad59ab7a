"""Documentation: generated pages are current, links and flags exist, and the examples run."""

import importlib.util
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servd.cli import make_parser
from servd.config import Config, options_by_name
from servd.terminal.engine_flags import read_config_file
from tests import vision_models
from tests.integration.conftest import shared
from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/*/*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a language."""
    fences = FENCE.findall(page.read_text(encoding="utf8"))
    return [text for its_language, text in fences if its_language == language]


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


def test_the_help_has_every_option_and_its_description(capsys):
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(["serve", "--help-all"])
    assert end.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    for section in msgspec.structs.fields(Config):
        assert (section.type.__doc__ or "").splitlines()[0].rstrip(".") in help_text
    for name in options_by_name():
        assert name == "model" or f"--{name.replace('_', '-')}" in help_text


def test_the_index_has_every_page():
    index = (ROOT / "docs/README.md").read_text(encoding="utf8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/*/*.md")}
    assert [name for name in sorted(pages) if f"]({name})" not in index] == []


def test_every_route_and_field_is_documented():
    from servd.api.protocol.chat import ChatCompletionRequest
    from servd.api.protocol.completions import CompletionRequest
    from servd.api.routes import load_routers

    routes_page = (ROOT / "docs/reference/routes.md").read_text(encoding="utf8")
    text = (ROOT / "docs/reference/http.md").read_text(encoding="utf8")
    for route in (route for router in load_routers() for route in router.routes):
        route_names = [f"`{method} {route.path_format}`" for method in route.methods]
        is_of_another = route.methods == {"HEAD"}  # of the GET with the same path
        assert is_of_another or any(name in routes_page for name in route_names), route.path_format
    for_the_record = {"user", "metadata", "store", "service_tier"}  # kept and without effect
    refused = {"best_of", "suffix"}
    fields = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert [
        name for name in sorted(fields - for_the_record - refused) if f"`{name}`" not in text
    ] == []


def test_compose_builds_the_images_that_exist():
    compose = msgspec.yaml.decode((ROOT / "docker/compose.yaml").read_bytes())
    for service in compose["services"].values():
        assert "build" in service or service["profiles"] in (["monitoring"], ["tls"])
        if build := service.get("build"):
            assert (ROOT / "docker" / build["context"] / build["dockerfile"]).exists()


def test_compose_publishes_on_this_machine_alone():
    compose = msgspec.yaml.decode((ROOT / "docker/compose.yaml").read_bytes())
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports and all(re.match(r"(\$\{\w+:-)?127\.0\.0\.1\}?:", port) for port in ports)


# ---- examples ----

SHOWN = {"text", "mermaid", "jinja"}  # not run; the template is compared above
URL = "http://localhost:8000"
SEEING = "HuggingFaceTB/SmolVLM-256M-Instruct"  # of the examples with PHOTO
PHOTO = "photo.jpg"


def examples(language: str) -> Any:
    """Parametrises with the blocks of a language on all pages."""
    cases = [(page, i, text) for page in PAGES for i, text in enumerate(blocks(page, language))]
    return pytest.mark.parametrize(
        "text", [pytest.param(text, id=f"{page.name}-{i}") for page, i, text in cases]
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo model, served as the pages say."""
    for server in shared("--device", "cpu", "--batch-dir", str(tmp_path_factory.mktemp("batches"))):
        yield server.url


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm")
    vision_models.make("smolvlm", folder)
    return folder


@pytest.fixture(scope="module")
def seeing_url(seeing_model: Path) -> Iterator[str]:
    for server in shared(str(seeing_model), "--served-model-name", SEEING, "--device", "cpu"):
        yield server.url


def with_photo(text: str, request: pytest.FixtureRequest) -> str:
    """Return an example that shows a picture, with a picture and a model that are there."""
    text = text.replace(PHOTO, "docs/images/console-live.webp")
    if URL in text:
        return text.replace(URL, request.getfixturevalue("seeing_url"))
    return text.replace(SEEING, str(request.getfixturevalue("seeing_model")))


def run_example(text: str, *program: str) -> str:
    """Run a block as its reader would; return what it prints."""
    result = subprocess.run(
        [*program, "-c", text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_python_example(text: str) -> str:
    """Run a block in a copy of this process, which has imported the libraries already."""
    import openai  # noqa: F401 - the copies share them
    import torch  # noqa: F401
    import transformers  # noqa: F401

    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        child = multiprocessing.get_context("fork").Process(
            target=execute, args=(text, printed.fileno(), errors.fileno())
        )
        child.start()
        child.join(WAIT_SECONDS)
        child.kill()
        errors.seek(0)
        assert child.exitcode == 0, errors.read().decode()
        printed.seek(0)
        return printed.read().decode()


def execute(text: str, output: int, errors: int) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.stdout = open(1, "w", encoding="utf8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf8", closefd=False)
    os.chdir(ROOT)
    warnings.simplefilter("default")
    exec(compile(text, "example", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


@every_page
def test_every_block_has_a_language_that_is_tried(page):
    languages = {language for language, _ in FENCE.findall(page.read_text(encoding="utf8"))}
    assert languages <= SHOWN | {"bash", "python", "console", "json", "toml"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@examples("bash")
def test_curl_examples(text, url, request):
    is_seen = PHOTO in text
    text = with_photo(text, request) if is_seen else text.replace(URL, url)
    printed = run_example(text, "bash", "-euo", "pipefail")
    if is_seen:
        assert msgspec.json.decode(printed)["choices"][0]["message"]["content"]
    elif '"stream": true' in text:
        events = [line.removeprefix("data: ") for line in printed.splitlines() if line]
        assert events[-1] == "[DONE]"
        chunks = [msgspec.json.decode(event)["choices"][0] for event in events[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) and chunks[-1]["finish_reason"]
    elif "/v1/decisions" in text:
        assert msgspec.json.decode(printed)["answers"]
    else:
        content = msgspec.json.decode(printed)["choices"][0]["message"]["content"]
        assert content in ("yes", "no") if '"choice"' in text else "OpenAI API" in content


@examples("python")
def test_python_examples(text, request):
    if PHOTO in text:
        text = with_photo(text, request)
    elif URL in text:
        text = text.replace(URL, request.getfixturevalue("url"))
    else:
        text = text.replace('"gpt2"', f'"{request.getfixturevalue("tiny_gpt2")}"')
    printed = run_python_example(text)
    promised = re.findall(r"print\(.*\)  # (.*)", text)
    assert [line for line in promised if line not in printed.splitlines()] == []
    assert len(printed.splitlines()) >= text.count("print(")


@examples("toml")
def test_configuration_files_can_be_read(text, tmp_path):
    file = tmp_path / "servd.toml"
    file.write_text(text)
    options = read_config_file(str(file))
    assert options and Config.load(options) != Config()


@examples("console")
def test_commands_exist(text):
    """Those of servd with their flags, targets of make, modules of Python."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf8")
    commands = 0
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.sub(r" {2,}#.*| >> .*", "", line.removeprefix("$ ")).split(" && "):
            match shlex.split(re.sub(r"^([A-Z]+=\S+ )+", "", command)):
                case ["servd", *arguments]:
                    make_parser().parse_args(arguments)
                case ["make", *words]:
                    targets = [word for word in words if "=" not in word]
                    assert [t for t in targets if f"\n{t}:" not in makefile] == []
                case ["python" | "python3", "-m", module, *_]:
                    assert importlib.util.find_spec(module), module
            commands += 1
    assert commands


def test_names_are_where_their_page_says():
    page = (ROOT / "docs/explanation/names.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \| (`[^|]*) \|", page, re.MULTILINE)
    assert len(rows) > 20
    for names, places in rows:
        sources = ""
        for place in re.findall(r"`([^`]+)`", places):
            path = ROOT / "servd" / place
            files = path.glob("*.py") if path.is_dir() else [path]
            sources += "".join(file.read_text() for file in files)
        for name in re.findall(r"`([\w.]+)`", names):
            last = name.rpartition(".")[2]
            assert re.search(rf"\b(class|def) {last}\b|\b{last}\b *[:=]", sources), (name, places)
