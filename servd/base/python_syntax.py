"""Python's own parser, made safe for threads."""

import ast
import inspect
import textwrap
import threading
from typing import Any

# Before 3.13, CPython counts the depth of the trees of all threads together. It fails if the count
# has changed meanwhile, because another thread ran while a tree was made.
_lock = threading.Lock()


def parse_python(source: str, mode: str = "exec") -> Any:
    """Return the result of `ast.parse`. Only one thread parses at a time."""
    with _lock:
        return ast.parse(source, mode=mode)


def parse_class(kind: type) -> ast.ClassDef:
    """Return the parsed source of a class. The lock covers `inspect`, which parses the module."""
    with _lock:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return tree
