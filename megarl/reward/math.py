"""The `number` reward: the number that a text ends in, compared exactly. Pure text, fractions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

GSM8K_MARK = "####"

_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}])[-+])?              # behind a word, number or bracket: an operator
    \$?
    (?P<digits>(?<![A-Za-z_0-9])(?<![0-9]\.)  # not within a word or another number
        (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?   # 1,234.5
        |[0-9]+(?:\.[0-9]+)?                                # 1234.5
        |(?<!\.)\.[0-9]+))                                  # .5
    (?P<exponent>[eE][-+]?[0-9]{1,3}(?!\w|\.[0-9]))?        # short: no text makes 10**(10**9)
    (?:\s?/\s?(?P<below>[0-9]+(?:\.[0-9]+)?))?
    (?P<percent>\s?%)?
    """,
    re.VERBOSE | re.ASCII,
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_THIN_SPACE = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|\{,\})(?=[0-9]{3})")  # 1\,234 and 1{,}234
_DELIMITER = re.compile(r"\\[,!;:() \[\]]|\\(?:left|right)\b")
_BRACES = re.compile(r"\\boxed\{|[{}]")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: 50% is Number(50, percent=True)."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """Exact equality. Where only one side has a percent sign, 50% is both 50 and 0.5."""
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


def score_number(response: str, answer: str, facts: Mapping[str, object]) -> float:
    r"""1.0 where the response's number is the answer's, 0.0 where it is another, or none is found.

    Raises ValueError where the answer itself holds no number.

    >>> score_number(r"So it is \boxed{1,042.0}. Check: 3", "#### 1042", {})
    1.0
    >>> score_number("It costs $-0.5 or -1/2.", "-0.50", {})
    1.0
    """
    gold = find_number(answer)
    if gold is None:
        raise ValueError(f"the answer {answer[:80]!r} holds no number")
    found = find_number(response)
    return float(found is not None and found.equals(gold))


def find_number(text: str) -> Number | None:
    r"""The number of a text: the last in its last \boxed{}, else the first behind its last ####,
    else the last of all.

    Thousands separators, a dollar sign, a percent sign, a trailing dot, a/b, \frac{a}{b} and 1e3
    are read. A minus after a word, a number or a bracket is an operator: "10-5" ends in 5.

    >>> find_number(r"the result is \boxed{\frac{3}{4}}, not 7").value
    Fraction(3, 4)
    >>> find_number("no digits here") is None
    True
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return _numbers(boxed)[-1]
    _, mark, behind = text.rpartition(GSM8K_MARK)
    return _numbers(behind)[0] if mark else _numbers(text)[-1]


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{..}, braces balanced, or None.

    >>> last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}} and \boxed{open")
    '\\frac{1}{2}'
    """
    found: tuple[int, int] | None = None
    opened: list[tuple[bool, int]] = []  # (whether a \boxed, where its content begins)
    for brace in _BRACES.finditer(text):
        if brace.group() != "}":
            opened.append((brace.group() != "{", brace.end()))
        elif opened:
            boxed, begin = opened.pop()
            if boxed and (found is None or begin > found[0]):
                found = (begin, brace.start())
    return None if found is None else text[found[0] : found[1]]


def _numbers(text: str) -> list[Number] | list[None]:
    """The numbers of a text in order; [None] where there is none."""
    parsed = (_parse(match) for match in _NUMBER.finditer(_plain(text)))
    return [number for number in parsed if number is not None] or [None]


def _plain(text: str) -> str:
    """A text with LaTeX's ways of writing numbers made plain."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\%", "%")
    text = text.replace("\\$", "$").replace("-$", "-")
    text = _DELIMITER.sub(" ", _THIN_SPACE.sub("", text))
    return _FRACTION.sub(lambda found: f"{found[1].strip()}/{found[2].strip()}", text)


def _parse(match: re.Match[str]) -> Number | None:
    """The matched number; None for a zero denominator or more digits than Python converts."""
    digits = match["digits"].replace(",", "")
    try:
        value = Fraction(digits + (match["exponent"] or ""))
        if match["below"] is not None:
            value /= Fraction(match["below"])
    except (ValueError, ZeroDivisionError):
        return None
    return Number(-value if match["sign"] == "-" else value, match["percent"] is not None)
