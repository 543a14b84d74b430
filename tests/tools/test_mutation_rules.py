"""Mutation testing leaves out what is no behavior, and nothing else."""

from __future__ import annotations

import pytest

from tools.mutation.rules import excluded, statement_lines


def left_out(source: str) -> list[str]:
    """The one-line places of `source` that get no mutant."""
    lines = source.splitlines()
    return [
        lines[start[0] - 1][start[1] : end[1]] if start[0] == end[0] else "several lines"
        for start, end in excluded(source)
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x: int | None = 1 + 2", ["int | None"]),
        ("def f(a: int | str = 3) -> A | B: return a + 1", ["A | B", "int | str"]),
        ('raise E(f"{a + 1} too many")', ['f"{a + 1} too many"']),
        ("raise make(a + 1) from error", ["a + 1"]),
        ('log.info("took=%d", a - b)', ['log.info("took=%d", a - b)']),
        ("assert a > 1", ["assert a > 1"]),
        ("pairs = zip(a + b, c, strict=True)", ["strict=True"]),
        ("@functools.lru_cache(maxsize=1)\ndef f(): return 1", ["@functools.lru_cache(maxsize=1)"]),
        ("@dataclass(frozen=True, eq=False)\nclass A: pass", ["frozen=True"]),
        ("if TYPE_CHECKING:\n    x = 1", ["several lines"]),
        ("class A:\n    def __repr__(self): return a + b", ["def __repr__(self): return a + b"]),
    ],
)
def test_place_without_behavior_gets_no_mutant(source: str, expected: list[str]) -> None:
    assert left_out(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "if a > 1: raise E",
        "x = f'{a + 1}'",
        "@property\ndef f(self): return 1",
        "log = a + b",
        "@dataclass(order=True)\nclass A: pass",
        "pairs = zip(a + b, c)",
    ],
)
def test_place_with_behavior_gets_mutants(source: str) -> None:
    assert left_out(source) == []


def test_column_is_counted_in_characters_behind_others_than_ascii() -> None:
    assert list(excluded('"é"; x: int = 1')) == [((1, 8), (1, 11))]


def test_lines_of_a_statement_are_all_but_those_of_its_body() -> None:
    source = "if (\n    a\n    or b\n):\n    x = f(\n        1\n    )\n"
    assert [list(statement_lines(source, line)) for line in (1, 3, 6)] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4],
        [5, 6, 7],
    ]
