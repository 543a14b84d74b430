"""The examples on the pages under docs/ are what the code does."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if ">>> " in page.read_text(encoding="utf-8")]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples(page: Path) -> doctest.DocTest:
    """A page's examples; the lines of its fences are blank, so that they end what is expected."""
    text = re.sub(r"^```.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_on_a_page_give_what_it_says(page: Path) -> None:
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    failed = runner.run(examples(page), out=told.append).failed
    assert not failed, "".join(told)


def test_the_page_on_resharding_has_examples() -> None:
    assert DOCS / "resharding.md" in PAGES
