"""Lengths of samples, in tokens: of a file of questions and answers, or drawn like GSM8K's."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from megarl.types import SampleRef

GROUP = 8  # responses to a prompt
TOKEN = re.compile(r"\d|[^\W\d_]+|[^\w\s]|_")  # about what tokenizers that split digits make
SPREAD = 0.35  # of the logarithms of response lengths within a group
QUESTION = (3.95, 0.38)  # mean and deviation of the logarithm: those of GSM8K's questions
ANSWER = (4.70, 0.42)


def draw(num_samples: int, seed: int, file: Path | None = None) -> list[tuple[int, int]]:
    """(prompt, response) tokens of groups of 8 responses to one prompt.

    Of the rows of `file`, JSON objects with `question` and `answer`, in a random order; else log-
    normal with GSM8K's means and deviations. A group's responses spread around their answer.
    """
    rng = random.Random(seed)
    rows = [] if file is None else _rows(file)
    rng.shuffle(rows)
    drawn = []
    for group in range(num_samples // GROUP):
        if rows:
            prompt, answer = rows[group % len(rows)]
        else:
            prompt, answer = (int(rng.lognormvariate(*each)) for each in (QUESTION, ANSWER))
        for _ in range(GROUP):
            response = int(answer * rng.lognormvariate(0.0, SPREAD))
            drawn.append((max(prompt, 1), max(response, 1)))
    return drawn


def _rows(file: Path) -> list[tuple[int, int]]:
    parsed = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [tuple(len(TOKEN.findall(row[key])) for key in ("question", "answer")) for row in parsed]  # type: ignore[misc]


def references(lengths: list[tuple[int, int]]) -> list[SampleRef]:
    """Samples of these lengths, of which there are no files."""
    return [
        SampleRef(f"g{index:06d}", "", 0, prompt + response, response, 1.0, version=0)
        for index, (prompt, response) in enumerate(lengths)
    ]
