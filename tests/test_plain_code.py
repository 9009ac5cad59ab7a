"""The linter of ARCHITECTURE's rules that ruff has no check for."""

import pytest

from tools import plain_code
from tools.plain_code import find_problems

PLAIN = [
    "batch, hidden = launched.computed",
    "batch, self.queue = self.queue, []",
    "total = num * (limit or 1)",
    "a, b = b, a",
    "a = b if c else d",
    "line = '-' * (end - begin)",
    "total += len(a) * 2",
    "def f() -> None:\n    return",
    "def f() -> None:\n    def g(): return h()",
    "self.num_left = state.shape",
]
PACKED = [
    "a, b = 1, 2",
    "first, *others = 1, 2, 3",
    "q, k = norm(q), norm(k)",
    "a = b if c else d if e else f",
    "a = (b if c else d) if e else f",
    "text = f'{name}: ' * bool(name)",
    "names = [name] * (name is not None)",
    "text = (a > b) * 'larger'",
    "x = [1,  2]  # fmt: skip",
    "total += a == b",
    "mask = bits * (bits > 0)",
    "end = begin + (not done)",
    "def f() -> None: return g()",
    "async def f() -> None: return await g()",
    "for each in states: pass",
    "self.shown = 1",
    "def f(given): pass",
    "if (found := f()): pass",
    "names = [own for own in names]",
]


@pytest.mark.parametrize("statement", PLAIN)
def test_plain_statements_pass(statement: str) -> None:
    assert not list(find_problems(statement))


@pytest.mark.parametrize("statement", PACKED)
def test_statements_that_say_several_things_are_found(statement: str) -> None:
    assert {line for line, _ in find_problems(statement)} == {1}


def test_a_package_may_not_exceed_its_ceiling(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/a.py").write_text("for each in states:\n    pass\nseen = 1\n")
    monkeypatch.setattr(plain_code, "CEILINGS", {"tools": {"name": 1}})
    assert plain_code.main(["tools/a.py"]) == 1
    assert "tools/a.py:3: say the noun" in capsys.readouterr().out
    monkeypatch.setattr(plain_code, "CEILINGS", {"tools": {"name": 2}})
    assert plain_code.main(["tools/a.py"]) == 0
