"""Write docs/numerics.md: the learner in every layout of 1, 2 and 4 ranks against Hugging Face.

    python -m tools.numerics [MODEL ...]

Runs the learners of tests/learner/parity_cases.py on this machine's CPUs and puts their rows into
the table; rows of models that are not named stay. Exit status 1 where a bound is passed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tests.learner.parity import GRADIENT_BOUND, LOSS_BOUND, LOSS_BOUNDS, Oracle, Runs
from tests.learner.parity_cases import ALL, RECOMPUTED, TIED
from tests.megatron_engine import Engine

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"
HEADER = ("case", "ranks", "loss", "gradient", "microbatches")


def measure(model: str, folder: Path, engine: Engine) -> Iterator[tuple[str, ...]]:
    """The rows of one model, whose learners run on ranks of `engine`."""
    cases = {n: c for n, c in ALL.items() if c.model == model and n != RECOMPUTED}
    oracle = Oracle(model, folder / model, model in TIED)
    runs = Runs(folder / "runs", cases, {model: oracle}, engine)
    for name, case in cases.items():
        loss, gradient = runs.loss_error(name), max(runs.gradient_errors(name).values())
        varied = f"{max(runs.variants(name).values()):.1e}" if case.variants else ""
        yield name, str(case.world_size), f"{loss:.1e}", f"{gradient:.1e}", varied


def main(models: list[str]) -> int:
    """Measure, write, and say whether the bounds hold."""
    text = PAGE.read_text()
    start = text.index("| case |")
    rows = {row[0]: row for row in map(_cells, text[start:].splitlines()[2:]) if row[0] in ALL}
    with closing(Engine()) as engine:
        for model in models or sorted({case.model for case in ALL.values()}):
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(model, Path(folder), engine):
                    print(*row, flush=True)
                    rows[row[0]] = row
    table = [HEADER, ("---",) * len(HEADER), *(rows[name] for name in ALL if name in rows)]
    PAGE.write_text(text[:start] + "".join(f"| {' | '.join(row)} |\n" for row in table))
    return int(any(_is_off(row) for row in rows.values()))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def _is_off(row: tuple[str, ...]) -> bool:
    name, _, loss, *gradients = row
    bound = LOSS_BOUNDS.get(ALL[name].model, LOSS_BOUND)
    return float(loss) > bound or any(float(g) > GRADIENT_BOUND for g in gradients if g)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
