"""The rules of the code base as tables: which room imports what, who may touch which library, how
large things are.

Everything is read from the source with `ast`; one test runs a process to see what is really loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[1]

# Room -> the rooms and modules that it may import of servd. `top` joins the rooms: it starts
# processes and offers the offline classes. Nobody imports the worker: the core names it once, as a
# string.
MAY_IMPORT = {
    "leaf": {"leaf"},
    "api": {"leaf", "api", "servd.core.client"},
    "core": {"leaf", "core"},
    "worker": {"leaf", "worker"},
    "top": {"leaf", "api", "core", "top"},
}
TOP = {
    "servd",
    "servd.__main__",
    "servd.llm",
    "servd.llm_engine",
    "servd.serve_app",
}  # and bench/, cli/, launch/, simulate/

# Library -> the files or folders that may import it. A library without a row may not be imported at
# all.
ONE_DOOR = {
    "aiohttp": ["servd/bench/_load.py"],
    "fastapi": ["servd/api/"],
    "gguf": ["servd/gguf.py", "servd/worker/quantization/gguf.py"],
    "httpx": ["servd/api/front.py", "servd/api/model_server.py", "servd/serve_app.py"],
    "huggingface_hub": ["servd/hf.py"],
    "jinja2": ["servd/api/chat_template.py"],
    "llguidance": ["servd/core/structured_output/"],
    "msgspec": ["servd/"],
    "numpy": ["servd/worker/", "servd/bench/_report.py", "servd/simulate/costs.py"],
    "opentelemetry": ["servd/api/observability/otel.py"],
    "prometheus_client": ["servd/api/metrics.py", "servd/api/collectors.py", "servd/api/front.py"],
    "pydantic": ["servd/api/"],
    "pydantic_core": ["servd/api/"],
    "safetensors": ["servd/worker/"],
    "starlette": ["servd/api/", "servd/serve_app.py"],
    "tokenizers": ["servd/api/tokenizer.py", "servd/api/detokenizer.py", "servd/gguf.py"],
    "torch": ["servd/worker/"],
    "tqdm": ["servd/llm.py", "servd/llm_engine.py", "servd/bench/", "servd/cli/"],
    "transformers": ["servd/worker/"],
    "triton": ["servd/worker/"],
    "typing_extensions": ["servd/api/"],
    "uvicorn": ["servd/api/server.py", "servd/api/front_server.py", "servd/api/http_protocol.py"],
    "uvloop": ["servd/api/server.py", "servd/api/front_server.py"],
    "zmq": ["servd/ipc.py"],
}

# What unpickles can run any code; what a process sends is a message of servd/messages.py.
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
PICKLING_CALLS = {"send_pyobj", "recv_pyobj", "torch.load", "torch.save", "numpy.load", "np.load"}

# Package of plugins -> the one public name that every file in it must have (a model's is named as
# in config.json).
PLUGINS = {
    "servd/api/reasoning_parsers": "Parser",
    "servd/api/routes": "router",
    "servd/api/routes/compat": "router",
    "servd/api/tool_parsers": "Parser",
    "servd/bench": "run",
    "servd/cli": "run",
    "servd/core/executor": "Executor",
    "servd/core/queues": "WaitingQueue",
    "servd/worker/attention": "Backend",
    "servd/worker/models": r"\w+(ForCausalLM|LMHeadModel|ForMaskedLM)",
    "servd/worker/quantization": "quantize|read",
    "servd/worker/readers": "Reader",
    "servd/worker/sample/logits_processors": "Processor",
    "servd/worker/spec_decode": "Proposer",
}

READS_BODIES = (
    "servd/api/context.py",
    "servd/api/protocol/",
    "servd/api/response_builders/",
    "servd/api/routes/",
)

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80
# "path" or "path::function" -> (lines, the reason that a reviewer accepted)
LONGER: dict[str, tuple[int, str]] = {}

BAD_NAMES = {"util", "utils", "helper", "helpers", "misc", "common"}


@dataclass
class Source:
    """One file of servd."""

    path: str
    text: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def imports(self) -> list[str]:
        """Dotted names of all imports, also of those inside functions; `from a import b` gives
        "a.b".
        """
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = (
                    self.module
                    if self.path.endswith("__init__.py")
                    else self.module.rpartition(".")[0]
                )
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                found += [f"{base}.{alias.name}" for alias in node.names]
        return found


SOURCES = [
    Source(str(p.relative_to(ROOT)), p.read_text(encoding="utf8"))
    for p in sorted(ROOT.glob("servd/**/*.py"))
]
MODULES = {source.module for source in SOURCES}
every_file = pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.path)


def room_of(name: str) -> str:
    """Room of a module, or of something imported from it."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    if name in TOP:
        return "top"
    room = name.split(".")[1]
    if room in ("bench", "cli", "launch", "simulate"):
        return "top"
    return room if room in ("api", "core", "worker") else "leaf"


def wrong_rooms(source: Source) -> list[str]:
    """Imports of servd that the source's room may not have."""
    allowed = MAY_IMPORT[room_of(source.module)]
    return [
        name
        for name in source.imports
        if name.split(".")[0] == "servd"
        and name not in ("servd", "servd.__version__")
        and room_of(name) not in allowed
        and not any(f"{name}.".startswith(f"{module}.") for module in allowed)
    ]


def wrong_siblings(source: Source) -> list[str]:
    """Imports of one route by another, and of templates, parsers and grammars by wire shapes."""
    if source.path.startswith("servd/api/routes/"):
        return [name for name in source.imports if name.startswith("servd.api.routes.")]
    if source.path.startswith("servd/api/protocol/"):
        allowed = ("servd.api.protocol.", "servd.api.prompt.")
        return [
            name
            for name in source.imports
            if name.startswith("servd.api") and not name.startswith(allowed)
        ]
    return []


def wrong_doors(source: Source) -> list[str]:
    """Libraries imported where they may not be."""
    libraries = (
        {name.split(".")[0] for name in source.imports} - {"servd"} - sys.stdlib_module_names
    )
    return sorted(
        name
        for name in libraries
        if not any(source.path.startswith(d) for d in ONE_DOOR.get(name, []))
    )


def pickling(source: Source) -> list[str]:
    """Imports and calls that pickle."""
    found = [name for name in source.imports if name.split(".")[0] in PICKLES]
    nodes = [*ast.walk(source.tree)]
    only_tensors = {
        node.func
        for node in nodes
        if isinstance(node, ast.Call)
        and any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in only_tensors:
            found += sorted({node.attr, ast.unparse(node)} & PICKLING_CALLS)
    return found


def reading_by_name(source: Source) -> list[str]:
    """Calls of `getattr` where bodies of requests are read: it finds fields that no shape declares,
    which nobody has validated.
    """
    if not source.path.startswith(READS_BODIES):
        return []
    return [
        f"{source.path}:{node.lineno}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name) and node.id == "getattr"
    ]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and length in lines of every function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield prefix + node.name, node.end_lineno - node.lineno + 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def too_long(source: Source) -> list[str]:
    """The file or functions of it over their limit."""
    sizes = [(source.path, source.text.count("\n"), MAX_FILE_LINES)]
    sizes += [
        (f"{source.path}::{name}", lines, MAX_FUNCTION_LINES)
        for name, lines in functions(source.tree)
    ]
    return [
        f"{name}: {lines} lines, at most {LONGER.get(name, (limit,))[0]}"
        for name, lines, limit in sizes
        if lines > LONGER.get(name, (limit,))[0]
    ]


@every_file
def test_rooms_import_only_what_they_may(source):
    assert wrong_rooms(source) == []


@every_file
def test_routes_and_wire_shapes_stand_by_themselves(source):
    found = wrong_siblings(source)
    assert [name for name in found if not name.endswith(".load_routers")] == []


@every_file
def test_libraries_are_imported_only_where_allowed(source):
    assert wrong_doors(source) == []


@every_file
def test_nothing_is_pickled(source):
    assert pickling(source) == []


@every_file
def test_no_field_of_a_body_is_read_by_name(source):
    assert reading_by_name(source) == []


@every_file
def test_sizes(source):
    assert too_long(source) == []


@every_file
def test_every_module_has_a_docstring(source):
    docstring = ast.get_docstring(source.tree)
    assert docstring
    assert docstring.split("\n\n")[0].strip().endswith((".", ":", "?"))


@every_file
def test_no_process_globals(source):
    assert [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Global)] == []


def test_no_catch_all_modules():
    assert [s.path for s in SOURCES if BAD_NAMES & set(s.module.split("."))] == []


def test_what_config_imports_does_not_need_it_first():
    """Whoever imports one of those files before config would meet half of it."""
    parts = [source for source in SOURCES if source.module.startswith("servd.config")]
    imported = {each for source in parts for name in source.imports
                for each in (name, name.rpartition(".")[0])}  # fmt: skip
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for known in [each for each in sys.modules if each.startswith('servd')]:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(name)\n"
    )
    names = sorted(MODULES & imported)
    assert len(names) > 10
    subprocess.run([sys.executable, "-c", program, *names], check=True, cwd=ROOT)


def test_only_executors_name_the_worker_and_each_does_once():
    named = [
        source.path
        for source in SOURCES
        if room_of(source.module) == "core"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("servd.worker")
    ]
    assert named
    assert all(path.startswith("servd/core/executor/") for path in named)
    assert len(named) == len(set(named))


PLUGIN_FILES = [
    pytest.param(source, name, id=source.path)
    for package, name in PLUGINS.items()
    for source in SOURCES
    if Path(source.path).parent == Path(package)
    and not Path(source.path).name.startswith("_")
    and "add_commands(" not in source.text  # a package of commands
]


@pytest.mark.parametrize(("source", "name"), PLUGIN_FILES)
def test_every_plugin_defines_the_name_its_package_requires(source, name):
    defined = [
        node.name for node in source.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    assigned = [
        ast.unparse(target)
        for node in source.tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    found = [c for c in defined + assigned if re.fullmatch(name, c)]
    assert len(found) == 1 or set(found) == {"quantize", "read"}  # a format may be made and read


def test_every_package_of_plugins_has_plugins():
    assert {Path(p.values[0].path).parent.as_posix() for p in PLUGIN_FILES} == set(PLUGINS)


def test_every_package_that_is_an_option_or_loads_its_own_files_is_a_package_of_plugins():
    options = [
        name
        for path in (ROOT / "servd/config").glob("*.py")
        for name in re.findall(r'"plugins": "([\w.]+)"', path.read_text())
    ]
    loading = [s.module for s in SOURCES if "plugins.load(__name__" in s.text]
    assert options
    assert {name.replace(".", "/") for name in options + loading} <= set(PLUGINS)


def test_api_and_core_load_neither_torch_nor_transformers():
    modules = [
        s.module
        for s in SOURCES
        if room_of(s.module) != "worker" and not s.module.endswith("__main__")
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'triton', 'safetensors'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=True,
    )
    assert result.stdout.strip() == "[]"


# A rule that cannot fail protects nothing: each is shown a source that breaks it.
BROKEN = [
    (wrong_rooms, "servd/api/x.py", "from servd.core.scheduler import Scheduler"),
    (wrong_rooms, "servd/api/x.py", "import servd.worker"),
    (wrong_rooms, "servd/core/x.py", "def f():\n    from servd.api import app"),
    (wrong_rooms, "servd/worker/x.py", "from servd.core.client import EngineCoreClient"),
    (wrong_rooms, "servd/core/x.py", "from ..api import app"),
    (wrong_rooms, "servd/messages.py", "from servd.core import client"),
    (wrong_rooms, "servd/hf.py", "from servd import LLM"),
    (wrong_rooms, "servd/llm.py", "from servd.worker import worker"),
    (wrong_siblings, "servd/api/routes/x.py", "from servd.api.routes.chat import router"),
    (wrong_siblings, "servd/api/protocol/x.py", "from servd.api.model_format import ModelFormat"),
    (wrong_doors, "servd/api/x.py", "import torch.nn"),
    (wrong_doors, "servd/core/x.py", "from zmq import Context"),
    (wrong_doors, "servd/core/x.py", "import a_new_library"),
    (pickling, "servd/x.py", "import pickle"),
    (pickling, "servd/x.py", "from multiprocessing import Queue"),
    (pickling, "servd/worker/x.py", "torch.load('x')"),
    (pickling, "servd/x.py", "socket.send_pyobj(1)"),
    (reading_by_name, "servd/api/routes/x.py", "getattr(body, 'timeout', None)"),
    (too_long, "servd/x.py", "pass\n" * (MAX_FILE_LINES + 1)),
    (too_long, "servd/x.py", "class A:\n  def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
]


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_the_rules_can_fail(rule, path, text):
    assert len(rule(Source(path, text))) == 1


def test_every_accepted_exception_is_still_needed():
    sizes = {s.path: (s.text.count("\n"), MAX_FILE_LINES) for s in SOURCES}
    sizes |= {
        f"{s.path}::{name}": (lines, MAX_FUNCTION_LINES)
        for s in SOURCES
        for name, lines in functions(s.tree)
    }
    needed = {name for name, (lines, limit) in sizes.items() if lines > limit}
    assert set(LONGER) <= needed
