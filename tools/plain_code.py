"""Find statements that say more than one thing: `python -m tools.plain_code [FILE...]`.

ARCHITECTURE's rules that ruff has no check for. Prints `file:line: message` and exits with 1.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PLACES = (ast.Name, ast.Attribute, ast.Subscript)


def is_packed(statement: ast.Assign) -> bool:
    """Return whether a statement assigns several values that could be assigned one by one.

    `a, b = b, a` and `taken, self.queue = self.queue, []` could not: a value reads a place that
    another value is assigned to.
    """
    targets = statement.targets[-1]
    values = statement.value
    if not isinstance(targets, ast.Tuple) or not isinstance(values, ast.Tuple):
        return False
    if len(targets.elts) != len(values.elts):
        return True
    places = [ast.unparse(target) for target in targets.elts]
    for index, value in enumerate(values.elts):
        read = {ast.unparse(node) for node in ast.walk(value) if isinstance(node, PLACES)}
        others = places[:index] + places[index + 1 :]
        if read.intersection(others):
            return False
    return True


def is_nested(choice: ast.IfExp) -> bool:
    """Return whether a conditional expression has another one as a branch or condition."""
    return any(isinstance(part, ast.IfExp) for part in (choice.test, choice.body, choice.orelse))


def is_text_times_condition(product: ast.BinOp) -> bool:
    """Return whether a text or list is multiplied by a condition, in place of an `if`."""
    if not isinstance(product.op, ast.Mult):
        return False
    sides = (product.left, product.right)
    has_sequence = any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )
    return has_sequence and any(is_condition(side) for side in sides)


def is_condition(value: ast.expr) -> bool:
    """Return whether an expression is True or False by its form."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "bool"
    is_not = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return is_not or isinstance(value, ast.Compare | ast.BoolOp)


def find_problems(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each statement to be written more plainly."""
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(r"#\s*fmt:\s*(skip|off)\b", line):
            yield number, "let ruff format this: no `fmt: skip`"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and is_packed(node):
            yield node.lineno, "assign one value in one statement"
        elif isinstance(node, ast.IfExp) and is_nested(node):
            yield node.lineno, "use `if` statements: a ternary is nested in another one"
        elif isinstance(node, ast.BinOp) and is_text_times_condition(node):
            yield node.lineno, "use `if`: a text or list is multiplied by a condition"


def main(names: list[str]) -> int:
    """Check the files, or all of servd/ and tools/ that git knows."""
    if not names:
        command = ["git", "ls-files", "servd/*.py", "tools/*.py"]
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    num_problems = 0
    for name in names:
        for line, message in find_problems(Path(name).read_text()):
            print(f"{name}:{line}: {message}")
            num_problems += 1
    return min(num_problems, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
