"""The number reward: what is read as a number, where, and when two are equal."""

from __future__ import annotations

import time

import pytest

from megarl.reward.math import find_number, last_boxed, score_number


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 36.", "36"),
        ("12 * 3 = 36\n\nThe answer is 36.<|im_end|>", "36"),
        (r"\boxed{36} because 12 * 3, see page 4", "36"),
        (r"\boxed{\text{about } 36}", "36"),
        (r"first \boxed{1}, then \boxed{36}", "36"),
        ("I say 3 #### 1,042 of 9", "1042"),
        ("It is 1,042.", "6*7=<<6*7=42>>42\n#### 1042"),
        (r"1{,}042", "1042"),
        (r"1\,042", "1042"),
        ("costs $1,042,000.50", "1042000.5"),
        (r"is \(5\)", "5"),
        (r"so x=\$5", "5"),
        ("**5**", "5"),
        ("答案是5。", "5"),
        ("36.0", "36"),
        ("36.", "36"),
        ("+36", "36"),
        ("036", "36"),
        ("-4", "-4"),
        ("−4", "-4"),
        ("0 - 4 = -4", "-4"),
        ("(-4)", "-4"),
        ("-$4", "-4"),
        ("10-5", "5"),
        ("x-5", "5"),
        ("wait...5", "5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("1/2", "0.5"),
        (r"\frac{1}{2}", "0.5"),
        (r"\boxed{-\dfrac{ 1 }{ 2 }}", "-1/2"),
        ("1e3", "1000"),
        ("It is 1.5e-3.", "0.0015"),
        ("50%", "50"),
        ("50 %", "0.5"),
        (r"50\%", "50%"),
        ("0.5", "50%"),
        ("0.1", "0.10"),
        ("123456789012345678901234567890", "123456789012345678901234567890.0"),
    ],
)
def test_response_has_the_answers_number(response: str, answer: str) -> None:
    assert score_number(response, answer, {}) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", "3"),
        ("three", "3"),
        ("3 or 4", "3"),
        ("4", "-4"),
        ("x3", "3"),
        (r"\boxed{none} 3", "3"),
        ("#### none, or 3?", "4"),
        ("1/0", "0"),
        ("3,4", "34"),
        ("0.30000000000000004", "0.3"),
        ("50%", "5"),
        ("9" * 5000, "9"),
    ],
)
def test_response_does_not_have_the_answers_number(response: str, answer: str) -> None:
    assert score_number(response, answer, {}) == 0.0


def test_answer_without_a_number_is_an_error_and_not_a_score() -> None:
    with pytest.raises(ValueError, match="'none' holds no number"):
        score_number("3", "none", {})


def test_boxed_content_has_balanced_braces_and_must_be_closed() -> None:
    assert last_boxed(r"\boxed{a{b}c} {") == "a{b}c"
    assert last_boxed(r"} \boxed{open \boxed{1} {2}") == "1"
    assert last_boxed(r"\boxed{\boxed{1}}") == "1"
    assert last_boxed("none") is None


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 5000, "1,111" * 8000, "-" * 40000, r"\frac{" * 6000, "1." * 20000]
)
def test_long_degenerate_text_is_read_fast(text: str) -> None:
    started = time.process_time()
    find_number(text)
    assert time.process_time() - started < 2.0  # of this process; quadratic would take a minute
