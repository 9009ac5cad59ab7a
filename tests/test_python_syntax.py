"""Python's parser among threads."""

import ast
import time
from concurrent.futures import ThreadPoolExecutor

from servd.base.python_syntax import parse_class, parse_python


def test_one_thread_parses_at_a_time(monkeypatch):
    """Two at once fail if garbage is collected meanwhile. `inspect` parses, too."""
    running, max_running, parse = 0, 0, ast.parse

    def counted(source: str, **options: str) -> ast.AST:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        time.sleep(0.01)
        running -= 1
        return parse(source, **options)

    monkeypatch.setattr(ast, "parse", counted)
    with ThreadPoolExecutor() as pool:
        trees = list(pool.map(parse_python, ["a = 1"] * 8))
        classes = list(pool.map(parse_class, [ThreadPoolExecutor] * 4))
    assert max_running == 1 and len(trees) == 8
    assert [executor.name for executor in classes] == ["ThreadPoolExecutor"] * 4
