"""Python's own parser, for any thread."""

import ast
import inspect
import textwrap
import threading
from typing import Any

# Before 3.13, CPython counts how deep the trees of all threads are together, and fails where that
# is not what it was: when another one got its turn as a tree was made.
_lock = threading.Lock()


def parse_python(source: str, mode: str = "exec") -> Any:
    """`ast.parse`, one at a time."""
    with _lock:
        return ast.parse(source, mode=mode)


def parse_class(kind: type) -> ast.ClassDef:
    """The source of a class; to find it, `inspect` parses the whole module."""
    with _lock:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return tree
