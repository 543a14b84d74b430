"""Rules that hold for every file of the repository."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

import pytest

from megarl.config.overrides import find_setting
from megarl.config.settings import group_names

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("megarl", "tools", "examples", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_file_and_its_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, functions) and node.end_lineno is not None
    }
    assert {n: length for n, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.is_relative_to(ROOT / "megarl")], ids=name
)
def test_module_opens_with_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_folder_has_a_drawer_for_everything() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [name(path) for path in SOURCES if path.name in drawers] == []


def fenced(language: str) -> list[tuple[str, str]]:
    """(page, text) of each code block in that language."""
    block = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(name(p), t) for p in PAGES for t in block.findall(p.read_text(encoding="utf-8"))]


def test_toml_in_the_pages_names_existing_settings() -> None:
    def unknown(table: dict, prefix: str = "") -> list[str]:
        wrong = []
        for key, value in table.items():
            if f"{prefix}{key}" in group_names():
                wrong += unknown(value, f"{prefix}{key}.")
            elif find_setting(f"{prefix}{key}")[0] is None:
                wrong.append(f"{prefix}{key}")
        return wrong

    wrong = {(page, key) for page, text in fenced("toml") for key in unknown(tomllib.loads(text))}
    assert wrong == set()


def test_python_in_the_pages_compiles() -> None:
    for page, text in fenced("python"):
        compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_options_in_the_pages_and_scripts_are_settings() -> None:
    scripts = [
        ROOT / "Makefile",
        *(ROOT / "slurm").glob("*"),
        *(ROOT / "tests" / "gpu").glob("*.sh"),
    ]
    option = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")
    wrong = [
        (name(path), found)
        for path in [*PAGES, *scripts]
        for found in option.findall(path.read_text(encoding="utf-8"))
        if found.split(".")[0] in {g.split(".")[0] for g in group_names()}
        and find_setting(found)[0] is None
    ]
    assert wrong == []


def test_links_between_pages_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
    broken = [
        (name(page), target)
        for page in PAGES
        for target in link.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_pin_is_exact() -> None:
    loose = [
        (file.name, line)
        for file in sorted((ROOT / "requirements").glob("*.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#") and "==" not in line
    ]
    assert loose == []


def test_extras_and_requirements_pin_the_same_versions() -> None:
    pin = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*])?==(\S+)$")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned: dict[str, set[str]] = {}
    lines = [line for extra in extras["optional-dependencies"].values() for line in extra]
    for file in (ROOT / "requirements").glob("*.txt"):
        lines += file.read_text(encoding="utf-8").splitlines()
    for line in lines:
        if match := pin.match(line.strip()):
            pinned.setdefault(match[1].lower().replace("_", "-"), set()).add(match[2])
    assert {package: sorted(found) for package, found in pinned.items() if len(found) > 1} == {}


def test_shell_files_are_executable_or_sourced() -> None:
    assert all(os.access(ROOT / name, os.X_OK) for name in (".ci/run", "tests/gpu/run.sh"))
