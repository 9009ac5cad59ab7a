"""Find statements that say more than one thing, and names that say nothing:
`python -m tools.plain_code [FILE...]`.

ARCHITECTURE's rules that ruff has no check for. Prints `file:line: message` and exits with 1 where
a package breaks a rule more often than plain_code.toml allows. Lower a number there when you can;
never raise one.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CEILINGS: dict[str, dict[str, int]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf8")
)
PLACES = (ast.Name, ast.Attribute, ast.Subscript)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Participles and pronouns, which name nothing by themselves.
BANNED = frozenset(
    "each given found asked one own known told least most others rest seen left taken wanted shown "
    "named".split()
)
MESSAGES = {
    "fmt": "let ruff format this: no `fmt: skip`",
    "packed": "assign one value in one statement",
    "nested": "use `if` statements: a ternary is nested in another one",
    "bool": "use `if`: a condition is an operand of + - or *",
    "none": "this function returns nothing: call, then `return`",
    "name": "say the noun: this name is a participle or a pronoun",
}


class Problem(NamedTuple):
    """A statement or name to be written more plainly."""

    line: int
    rule: str  # a key of MESSAGES


def is_packed(statement: ast.Assign) -> bool:
    """Return whether a statement assigns several values that could be assigned one by one.

    `a, b = b, a` and `batch, self.queue = self.queue, []` could not: a value reads a place that
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
        other_places = places[:index] + places[index + 1 :]
        if read.intersection(other_places):
            return False
    return True


def is_nested(choice: ast.IfExp) -> bool:
    """Return whether a conditional expression has another one as a branch or condition."""
    return any(isinstance(part, ast.IfExp) for part in (choice.test, choice.body, choice.orelse))


def has_condition(node: ast.AST) -> bool:
    """Return whether a condition is an operand of + - or *, as in `total += a == b`."""
    if isinstance(node, ast.BinOp):
        operands = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        operands = [node.value]
    else:
        return False
    is_arithmetic = isinstance(node.op, ast.Add | ast.Sub | ast.Mult)
    return is_arithmetic and any(is_condition(operand) for operand in operands)


def is_condition(value: ast.expr) -> bool:
    """Return whether an expression is True or False by its form."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "bool"
    if isinstance(value, ast.BoolOp):  # `limit or 1` is a number
        return any(map(is_condition, value.values))
    is_not = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return is_not or isinstance(value, ast.Compare)


def returned_calls(function: ast.AST) -> Iterator[ast.Return]:
    """Yield the statements that return the value of a call from a function that returns None."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if not isinstance(function.returns, ast.Constant) or function.returns.value is not None:
        return
    nodes: list[ast.AST] = [*function.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call | ast.Await):
            yield node
        if not isinstance(node, FUNCTIONS):
            nodes += ast.iter_child_nodes(node)


def bound_name(node: ast.AST) -> str | None:
    """Return the name that a node binds: a variable, argument, attribute, function or class."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.alias(asname=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.ExceptHandler(name=name):
            return name
    return None


def find_problems(source: str) -> Iterator[Problem]:
    """Yield each statement and name to be written more plainly."""
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(r"#\s*fmt:\s*(skip|off)\b", line):
            yield Problem(number, "fmt")
    for node in ast.walk(ast.parse(source)):
        line_number = getattr(node, "lineno", 0)
        if isinstance(node, ast.Assign) and is_packed(node):
            yield Problem(line_number, "packed")
        elif isinstance(node, ast.IfExp) and is_nested(node):
            yield Problem(line_number, "nested")
        elif has_condition(node):
            yield Problem(line_number, "bool")
        elif bound_name(node) in BANNED:
            yield Problem(line_number, "name")
        for statement in returned_calls(node):
            yield Problem(statement.lineno, "none")


def package_of(path: str) -> str:
    """Return the package of a file, two folders deep at most below servd/, and one elsewhere."""
    folders = path.split("/")[:-1]
    return "/".join(folders[: 3 if folders[:1] == ["servd"] else 2])


def main(paths: list[str]) -> int:
    """Check the files, or all that git knows."""
    if not paths:
        command = ["git", "ls-files", "servd/*.py", "tests/*.py", "benchmarks/*.py", "tools/*.py"]
        command.append("setup.py")
        paths = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in paths:
        for line, rule in find_problems(Path(path).read_text(encoding="utf8")):
            lines[package_of(path), rule].append(f"{path}:{line}: {MESSAGES[rule]}")
    is_plain = True
    for (package, rule), problems in lines.items():
        ceiling = CEILINGS.get(package, {}).get(rule, 0)
        if len(problems) > ceiling:
            is_plain = False
            print(*problems, sep="\n")
            print(f"{package or '.'}: {len(problems)} of these, allowed are {ceiling}")
    return 0 if is_plain else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
