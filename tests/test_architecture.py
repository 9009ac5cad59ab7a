"""The rules of the code base that import-linter and ruff cannot hold (see .importlinter).

Everything is read from the source with `ast`; one test runs a process to see what is really loaded.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[1]

# What unpickles can run any code (CVE-2025-32444, 2025-30165, 2024-11041, 2026-3059, 2026-3060,
# 2026-3989): what a process sends is a message of servd/messages/engine.py.
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
PICKLING_CALLS = {"send_pyobj", "recv_pyobj", "torch.load", "torch.save", "numpy.load", "np.load"}
LAST_NAMES = {name.split(".")[-1] for name in PICKLING_CALLS}

# Package of plugins -> the one public name that every file in it must have (a model's is named as
# in config.json).
PLUGINS = {
    "servd/api/output/reasoning_parsers": r"\w+ReasoningParser",
    "servd/api/routes": "router",
    "servd/api/routes/compat": "router",
    "servd/api/output/tool_parsers": r"\w+ToolParser",
    "servd/cli": "add_options",
    "servd/bench": "run",
    "servd/core/executor": r"\w+Executor",
    "servd/core/queues": r"\w+Queue",
    "servd/worker/attention": r"\w+Backend",
    "servd/worker/models": r"\w+(ForCausalLM|LMHeadModel|ForMaskedLM)",
    "servd/worker/quantization": "quantize|read",
    "servd/worker/output_heads": r"Pooler|\w+Head",
    "servd/worker/sample/logits_processors": r"\w+Processor",
    "servd/worker/spec_decode": r"\w+Proposer",
}

READS_BODIES = (
    "servd/api/context.py",
    "servd/api/protocol/",
    "servd/api/serving/",
    "servd/api/routes/",
)

BAD_NAMES = {"util", "utils", "helper", "helpers", "misc", "common"}


STATEFUL_TYPES = {
    *("ContextVar", "Counter", "Event", "Lock", "OrderedDict", "Queue", "RLock", "SimpleQueue"),
    *("WeakKeyDictionary", "WeakValueDictionary", "count", "defaultdict", "deque", "local"),
}
FACTORIES = {"APIRouter", "ConfigDict", "Encoder", "TypeVar"}  # of instances that do not change
MUTATING_METHODS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "put", "remove", "setdefault", "update"),
}
# State that no object owns, and why.
STATE_OF_PROCESSES = {
    # Filled while modules are imported, and constant afterwards.
    ("servd/api/http/route.py", "ANSWERS"),
    # Each task or thread has its own value.
    ("servd/api/text/chat_template.py", "_budget"),
    ("servd/base/abandoned.py", "_is_abandoned"),
    ("servd/base/log.py", "current_request"),
    ("servd/worker/models/_transformers_attention.py", "CONTEXT"),
    # Locks of what Python or the file system has once per process.
    ("servd/api/serving/run_manifest.py", "_hashing"),
    ("servd/base/private_dir.py", "_locks"),
    ("servd/base/python_syntax.py", "_lock"),
}


@dataclass
class Source:
    """One file of servd."""

    path: str
    text: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    @cached_property
    def imports(self) -> list[str]:
        """Dotted names of all imports, inside functions too; `from a import b` gives "a.b"."""
        names = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = (
                    self.module
                    if self.path.endswith("__init__.py")
                    else self.module.rpartition(".")[0]
                )
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names += [f"{base}.{alias.name}" for alias in node.names]
        return names

    @property
    def defined(self) -> list[str]:
        """Names of the classes, functions and variables of the module."""
        names = []
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names += [ast.unparse(target) for target in node.targets]
        return names


SOURCES = [
    Source(str(p.relative_to(ROOT)), p.read_text(encoding="utf8"))
    for p in sorted(ROOT.glob("servd/**/*.py"))
]

# What servd uses of libraries that they do not promise to keep.
COMPAT = ("servd/base/compat.py", "servd/worker/compat.py")
DOCUMENTED = {"_exit", "_replace"}  # in spite of their names: of os, of named tuples


def pickling(source: Source) -> list[str]:
    """Imports and calls that pickle."""
    names = [name for name in source.imports if name.split(".")[0] in PICKLES]
    nodes = source.nodes
    only_tensors = {
        node.func
        for node in nodes
        if isinstance(node, ast.Call)
        and any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
    }
    for node in nodes:
        if not isinstance(node, ast.Attribute) or node in only_tensors:
            continue
        if node.attr in LAST_NAMES:
            names += sorted({node.attr, ast.unparse(node)} & PICKLING_CALLS)
    return names


def reading_by_name(source: Source) -> list[str]:
    """Calls of `getattr` where bodies are read: it finds fields that nobody has validated."""
    if not source.path.startswith(READS_BODIES):
        return []
    return [
        f"{source.path}:{node.lineno}"
        for node in source.nodes
        if isinstance(node, ast.Name) and node.id == "getattr"
    ]


def wrong_shapes(source: Source) -> list[str]:
    """Imports of templates, parsers and grammars by the shapes of the wire."""
    if not source.path.startswith("servd/api/protocol/"):
        return []
    allowed = ("servd.api.protocol.", "servd.api.text.prompt.")
    return [
        name
        for name in source.imports
        if name.startswith("servd.api") and not name.startswith(allowed)
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_defined(source: Source) -> set[str]:
    """Functions, classes, variables and attributes that a file gives a value."""
    names: set[str] = set()
    for node in source.nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def names_of_libraries(source: Source) -> tuple[set[str], list[str]]:
    """Names in a file that stand for what it imports from libraries, and its imports of private
    modules and names of them.
    """
    aliases: set[str] = set()
    private: list[str] = []
    for node in source.nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            path = f"{base}{alias.name}"
            is_own = path.split(".")[0] == "servd" or getattr(node, "level", 0)
            if not is_own:
                aliases.add(alias.asname or (alias.name if base else path.split(".")[0]))
                private += [path] if any(map(is_private, path.split("."))) else []
    return aliases, private


def overriding(source: Source, aliases: set[str]) -> list[str]:
    """Private methods of classes that derive from a library's, which the file itself never calls:
    the library does.
    """
    nodes = source.nodes
    methods = [
        (node.name, method.name)
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split(".")[0] in aliases for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and is_private(method.name)
    ]
    names = {name for _, name in methods}
    called = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and ast.unparse(node.value) != "super()"
    }
    return [f"{owner}.{name}" for owner, name in methods if name not in called]


def using_private_names(source: Source) -> list[str]:
    """What a file uses of libraries that they do not promise to keep: it belongs into a compat.
    Attributes of objects count as private ones of libraries if no file of servd sets them.
    """
    if source.path in COMPAT:
        return []
    aliases, overrides = names_of_libraries(source)
    overrides += overriding(source, aliases)
    own_names = DEFINED | names_defined(source)
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node).split(".")[0]
            if root in aliases or node.attr not in own_names:
                overrides.append(ast.unparse(node))
    return [name for name in overrides if name.split(".")[-1] not in DOCUMENTED]


def is_stateful(name: str, value: ast.expr | None) -> bool:
    """Return whether a name is bound to a call that makes an object with state."""
    if not isinstance(value, ast.Call):
        return False
    called = ast.unparse(value.func).split(".")[-1]
    if called in FACTORIES:
        return False
    return called in STATEFUL_TYPES or (called[:1].isupper() and name.islower())


def bindings(source: Source) -> Iterator[tuple[set[str], str, ast.expr | None]]:
    """Names of modules and classes, but no fields: as the file may write them, and their values."""
    for owner in source.nodes:
        if not isinstance(owner, ast.Module | ast.ClassDef):
            continue
        holders = ["self.", "cls.", f"{owner.name}."] if isinstance(owner, ast.ClassDef) else [""]
        for node in owner.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    yield {holder + name for holder in holders}, name, value
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
                    if isinstance(owner, ast.Module) or "ClassVar" in ast.unparse(kind):
                        yield {holder + name for holder in holders}, name, value


def sharing_state(source: Source) -> list[str]:
    """Names of modules and classes that are bound to objects with state, or that the file changes.
    A process has one of each, whoever uses it: give it to the object that owns it.
    """
    changed: set[str] = set()
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=holder, attr=method)):
                if method in MUTATING_METHODS:
                    changed.add(ast.unparse(holder))
            case ast.Subscript(value=holder, ctx=ast.Store() | ast.Del()):
                changed.add(ast.unparse(holder))
    return [
        name
        for names, name, value in bindings(source)
        if (is_stateful(name, value) or names & changed)
        and (source.path, name) not in STATE_OF_PROCESSES
    ]


DEFINED = {name for source in SOURCES for name in names_defined(source)}


@pytest.mark.parametrize(
    "rule", [pickling, reading_by_name, wrong_shapes, using_private_names, sharing_state]
)
def test_no_file_breaks_a_rule(rule):
    broken = {source.path: rule(source) for source in SOURCES}
    assert {path: problems for path, problems in broken.items() if problems} == {}


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (pickling, "servd/x.py", "import pickle"),
        (pickling, "servd/x.py", "from multiprocessing import Queue"),
        (pickling, "servd/worker/x.py", "torch.load('x')"),
        (pickling, "servd/x.py", "socket.send_pyobj(1)"),
        (reading_by_name, "servd/api/routes/x.py", "getattr(body, 'timeout', None)"),
        (sharing_state, "servd/x.py", "known = []\n\ndef add(x):\n    known.append(x)"),
        (sharing_state, "servd/x.py", "class A:\n    known = {}\n\nA.known[1] = 2"),
        (sharing_state, "servd/x.py", "numbers = itertools.count()"),
        (sharing_state, "servd/x.py", "pages = HugePages()"),
        (wrong_shapes, "servd/api/protocol/x.py", "from servd.api.output.incremental import Delta"),
    ],
)
def test_the_rules_can_fail(rule, path, text):
    assert len(rule(Source(path, text))) == 1


@pytest.mark.parametrize("path", COMPAT)
def test_what_is_private_of_a_library_has_its_versions_and_a_reason(path: str):
    [source] = [source for source in SOURCES if source.path == path]
    [tested] = [
        ast.literal_eval(node.value)
        for node in source.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED"
    ]
    assert all(re.search(r"\d+\.\d+-\d+\.\d+$", versions) for versions in tested.values())
    used: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            reason = ast.get_docstring(node) or ""
            libraries = {library for library in tested if library in reason}
            assert libraries, f"{node.name} does not say which library it is for, and why"
            used |= libraries
    assert used == {*tested}


def test_every_library_has_an_import_contract():
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter")
    protected = {
        name
        for contract in contracts.values()
        for name in contract.get("protected_modules", "").split()
    }
    imported = {name.split(".")[0] for source in SOURCES for name in source.imports}
    assert imported - sys.stdlib_module_names - {"servd", "msgspec"} - protected == set()


def test_no_catch_all_modules():
    assert [s.path for s in SOURCES if BAD_NAMES & set(s.module.split("."))] == []


def test_only_executors_name_the_worker_and_each_does_once():
    naming = [
        source.path
        for source in SOURCES
        if source.path.startswith("servd/core/")
        for node in source.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("servd.worker")
    ]
    assert naming
    assert all(path.startswith("servd/core/executor/") for path in naming)
    assert len(naming) == len(set(naming))


def test_every_plugin_defines_the_name_its_package_requires():
    wrong = []
    for package, pattern in PLUGINS.items():
        plugins = [
            source
            for source in SOURCES
            if Path(source.path).parent == Path(package)
            and not Path(source.path).name.startswith("_")
        ]
        assert plugins, f"{package} has no plugins"
        for source in plugins:
            names = [name for name in source.defined if re.fullmatch(pattern, name)]
            # A format may be made and read.
            if len(names) != 1 and set(names) != {"quantize", "read"}:
                wrong.append(f"{source.path}: {names}, needs one {pattern}")
    assert wrong == []


def test_plugin_packages_are_listed():
    options = [
        name
        for path in (ROOT / "servd/config").glob("*.py")
        for name in re.findall(r'"plugins": "([\w.]+)"', path.read_text())
    ]
    loading = [s.module for s in SOURCES if "plugins.load_class(__name__" in s.text]
    assert options
    assert {name.replace(".", "/") for name in options + loading} <= set(PLUGINS)


def test_api_and_core_load_neither_torch_nor_transformers():
    modules = [
        s.module
        for s in SOURCES
        if not s.path.startswith("servd/worker/") and not s.module.endswith("__main__")
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


def test_classes_of_models_are_at_most_two_deep():
    """A model file reads like its paper: what it shares with others are parts of it."""
    bases = {
        (source.module, node.name): [ast.unparse(base) for base in node.bases]
        for source in SOURCES
        if source.module.startswith("servd.worker.")
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    }
    class_bases = {name: base_names for (_, name), base_names in bases.items()}

    def depth(name: str) -> int:
        depths = [depth(base) for base in class_bases.get(name, []) if base in class_bases]
        return 1 + max(depths, default=0)

    models = [name for module, name in bases if module.startswith("servd.worker.models.")]
    assert {name: depth(name) for name in models if depth(name) > 2} == {}


# Lines of Python in servd/: 58,223, and 3,067 for what real clients, peers' tests and public bug
# reports asked for: messages that templates refuse and special tokens (771), calls that are not
# quite JSON (519), hosts, scopes and logs (760), grammars (340), bodies and fields (560), answers
# that nobody reads (110). What files of models say, which is used or refused by name: the account
# (230), weights, heads and rotations (259), tokenizers and GGUF (285), adapters and vectors (220).
# The shape and the names of the system, whose files and classes came first (1,440): what they make
# superfluous is to be deleted in the same issue, until 56,000 are left. `servd trace` (410; it was
# 267 in tools/) and collective_rpc with its checks of new weights (520). The first ten minutes and
# several hosts: the interface of workers (42), names of llama-server and typos of paths (14),
# sampling parameters that hold, a limit of answers in chats, a verdict of simulations (60), what a
# user of a terminal sees and types while a server starts or answers, and that server's log (70),
# heartbeats between hosts (114), ends that a review asked for (48), waits for a CPU, which are no
# hang, and last messages (62), the outputs of vLLM's offline scripts (48), parameters in the
# gateway and /api/show, nulls beside a field's other name, and rates of prompts (43), and what a
# review and a user found (35). Files of one family of routes became one: 138 fewer. Coding agents:
# grammars of calls in free text, of custom tools and of structural tags (850), responses and
# conversations in SQLite (930), samplers of llama.cpp (550), what Claude Code sends (390), launch
# and scripted answers (290), long conversations (230), what Codex sends (210), progress (100), and
# what a review and an attacker found (130). A helper who only simplified: 329 fewer. The models
# that people serve, on CUDA: packed weights of 4 and 8 bits and more formats (700), what a step
# moves and launches, by cards, in `servd plan` (600), experts in few launches (220), attention of
# more shapes (155), faults of that path (120); a helper who only simplified: 390 fewer. Models with
# states: checkpoints in the cache and its connector (530), operations and their layers (500), five
# families (540), their GGUF files (130), what users see (160), what a review and a user found (32);
# a helper who only simplified: 158 fewer. Pictures: a process that decodes them, their addresses
# and caches (790), in the bodies of all APIs and in prompts (560), families and towers (650), in
# the scheduler and in hashes (290), in the model runner, with M-RoPE and both directions (520),
# what users see (240), what a review and an attacker found (200), a profile of the tower (30) and
# its attention by a kernel (40); operations that were declared three times: 156 fewer, and helpers
# who only simplified: 540 fewer.
MAX_LINES = 74_100


def test_the_package_stays_small():
    num_lines = sum(len(source.text.splitlines()) for source in SOURCES)
    assert num_lines <= MAX_LINES, "delete lines of servd/, or give the reason beside MAX_LINES"
