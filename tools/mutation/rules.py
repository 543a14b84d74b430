"""Which places of a source no mutant is made at, and which lines make one statement.

Owns the rules that docs/testing.md states: a change there is not one of behavior. Knows nothing of
Cosmic Ray or of tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

Position = tuple[int, int]  # line from 1, column from 0

KEPT_DECORATORS = {"cache", "lru_cache", "overload", "override", "abstractmethod"}
WORDING = {"__repr__", "__str__"}


def excluded(source: str) -> Iterator[tuple[Position, Position]]:
    """Start and end of each place that is left out.

    >>> list(excluded("x: int | None = 1"))
    [((1, 3), (1, 13))]
    """
    lines = source.encode().splitlines()

    def position(line: int, num_bytes: int) -> Position:
        return line, len(lines[line - 1][:num_bytes].decode())

    for node in ast.walk(ast.parse(source)):
        for part in _without_behavior(node):
            start = position(part.lineno, part.col_offset)
            if part in getattr(node, "decorator_list", ()):
                start = part.lineno, 0  # its removal is placed at the @
            assert part.end_lineno is not None and part.end_col_offset is not None
            yield start, position(part.end_lineno, part.end_col_offset)


def statement_lines(source: str, line: int) -> range:
    """The lines that the statement around `line` takes, without those of its body.

    Coverage names only some lines of a statement over several.

    >>> statement_lines("if (\\n  a\\n  or b\\n):\\n  c", 1)
    range(1, 5)
    """
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if node.lineno <= line <= end:
                found = range(node.lineno, end + 1)
    return found


def _without_behavior(node: ast.AST) -> Iterator[ast.expr | ast.stmt | ast.keyword]:
    match node:
        case ast.AnnAssign(annotation=annotation):
            yield annotation
        case ast.arg(annotation=ast.expr() as annotation):
            yield annotation
        case ast.Raise(exc=ast.Call(args=texts, keywords=more)):
            yield from [*texts, *more]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            yield node
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert():
            yield node
        case ast.Call(func=ast.Name(id="zip"), keywords=keywords):
            yield from keywords
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if node.returns:
                yield node.returns
            if node.name in WORDING:
                yield node
            yield from (d for d in node.decorator_list if _name(d) in KEPT_DECORATORS)
        case ast.ClassDef():
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and _name(decorator) == "dataclass":
                    yield from (k for k in decorator.keywords if k.arg in ("frozen", "slots"))


def _name(decorator: ast.expr) -> str:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function).rpartition(".")[2]
