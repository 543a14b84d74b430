"""A user's reward function: what is loaded, what is refused, and what it may return."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.errors import RewardError
from megarl.reward.function import checked_value, is_async, load_function


def write(folder: Path, code: str) -> Path:
    path = folder / "mine.py"
    path.write_text(code)
    return path


def test_function_is_loaded_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("FACTOR = 3")
    path = write(
        tmp_path,
        "from neighbour_of_mine import FACTOR\n"
        "def score(response, answer, facts): return FACTOR * len(response)\n"
        "async def later(response: str, answer: str, facts: dict, scale: float = 1.0) -> float:\n"
        "    return 1.0\n",
    )
    assert load_function(f"{path}:score")("abc", "", {}) == 9
    assert is_async(load_function(f"{path}:later")) and not is_async(load_function(f"{path}:score"))


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("", "", "must be path/to/file.py:name"),
        (":score", "def other(): pass", r"has functions \['other'\], no 'score'"),
        (":score", "score = 3", "no 'score'"),
        (":score", "def score(response): pass", r"score\(response\) cannot be called with"),
        (":score", "def score(a, b, c, d): pass", "missing a required argument: 'd'"),
        (":score", "x = 1\nraise KeyError('boom')", "failed at line 2: KeyError: 'boom'"),
        (":score", "x = 1\ndef score(:\n", "failed at line 2: SyntaxError"),
    ],
)
def test_unfit_function_is_an_error_that_says_why(
    tmp_path: Path, name: str, code: str, found: str
) -> None:
    path = write(tmp_path, code)
    with pytest.raises(RewardError, match=found):
        load_function(f"{path}{name}")


def test_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"there is no file .*absent\.py"):
        load_function(f"{tmp_path}/absent.py:score")


@pytest.mark.parametrize(
    ("returned", "value"),
    [(True, 1.0), (False, 0.0), (2, 2.0), (-0.5, -0.5), (np.float32(0.5), 0.5)],
)
def test_numbers_and_booleans_are_rewards(returned: object, value: float) -> None:
    assert checked_value(returned) == value


@pytest.mark.parametrize("returned", [None, "1", float("nan"), float("inf"), [1.0], 1j])
def test_what_is_no_finite_number_is_no_reward(returned: object) -> None:
    with pytest.raises(ValueError, match="returned"):
        checked_value(returned)
