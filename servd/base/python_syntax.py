"""Python's own parser, made safe for threads."""

import ast
import itertools
import sys
import threading
from pathlib import Path
from typing import Any

# Before 3.13, CPython counts the depth of the trees of all threads together. It fails if the count
# has changed meanwhile, because another thread ran while a tree was made.
_lock = threading.Lock()


def parse_python(source: str, mode: str = "exec") -> Any:
    """Return the result of `ast.parse`. Only one thread parses at a time."""
    with _lock:
        return ast.parse(source, mode=mode)


def parse_class(kind: type) -> ast.ClassDef:
    """Return the parsed source of a class at the top level of a module."""
    file = sys.modules[kind.__module__].__file__
    assert file is not None
    tree = parse_python(Path(file).read_text(encoding="utf8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == kind.__name__)


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, each as one line, by field name."""
    texts: dict[str, str] = {}
    for field, below in itertools.pairwise(parse_class(kind).body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts
