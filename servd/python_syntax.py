"""Python's own parser, for any thread."""

from __future__ import annotations

import ast
import threading
from typing import Any

# Before 3.13, CPython counts how deep the trees of all threads are together, and fails where that
# is not what it was: when another one got its turn as a tree was made.
_lock = threading.Lock()


def parse_python(source: str, mode: str = "exec") -> Any:
    """`ast.parse`, one at a time."""
    with _lock:
        return ast.parse(source, mode=mode)
