"""The linter of ARCHITECTURE's rules that ruff has no check for."""

import pytest

from tools.plain_code import find_problems

PLAIN = [
    "batch, hidden = launched.computed",
    "taken, self.queue = self.queue, []",
    "a, b = b, a",
    "a = b if c else d",
    "line = '-' * (end - begin)",
    "mask = bits * (bits > 0)",
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
]


@pytest.mark.parametrize("statement", PLAIN)
def test_plain_statements_pass(statement: str) -> None:
    assert not list(find_problems(statement))


@pytest.mark.parametrize("statement", PACKED)
def test_statements_that_say_several_things_are_found(statement: str) -> None:
    assert [line for line, _ in find_problems(statement)] == [1]
