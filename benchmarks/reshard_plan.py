"""How good the resharding plan is: bytes against the minimum, balance, seconds, and others beside.

    python benchmarks/reshard_plan.py [--rows NAME...] [--json] [--no-awex] [--seconds 60]
    python benchmarks/reshard_plan.py --list

Needs no GPU and moves no bytes: it plans from layouts alone. The last line printed is one JSON
object; benchmarks/README.md explains its keys. Exits with 1 where the plan sends more than 1.01
times the minimum, or where a formula contradicts the counted minimum.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []  # it may be run as a file
os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported, here and in each fresh process

from benchmarks.reshard.awex import AwexPlan, fetch  # noqa: E402
from benchmarks.reshard.measure import measure_awex, measure_own  # noqa: E402
from benchmarks.reshard.report import Figures, progress, row_figures, summary, table  # noqa: E402
from benchmarks.reshard.rows import ROWS, Row  # noqa: E402

ALLOWED_RATIO = 1.01


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the rows, print tables and the JSON line; the exit status."""
    options = _options(arguments)
    if options.list:
        print("\n".join(row.name for row in ROWS))
        return 0
    rows = [row for row in ROWS if not options.rows or row.name in options.rows]
    folder = None if options.no_awex else fetch(ROOT / ".cache")
    figures = []
    for row in rows:
        figures.append(measure_row(row, options.runs, folder, options.seconds))
        if not options.json:
            print(progress(figures[-1]), file=sys.stderr, flush=True)
    result = summary(figures)
    if not options.json:
        print(table(figures))
    print(json.dumps(result))
    return 0 if result["max_bytes_ratio"] <= ALLOWED_RATIO and result["formula_agrees"] else 1


def measure_row(row: Row, num_runs: int, folder: Path | None, limit_s: float) -> Figures:
    """The figures of one row; without awex where `folder` is None."""
    own = measure_own(row, num_runs)
    awex: AwexPlan | None = None
    if folder is not None:
        awex = measure_awex(row, own.plan.busiest, folder, limit_s)
    return row_figures(row, own, awex)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="these rows instead of all")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--no-awex", action="store_true", help="leave awex's planner out")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="limit of one call of awex's planner"
    )
    parser.add_argument("--runs", type=int, default=3, help="timed runs, each in a new process")
    options = parser.parse_args(arguments)
    for name in options.rows or ():
        if name not in names:
            parser.error(f"--rows: there is no row {name!r}; --list prints the names")
    return options


if __name__ == "__main__":
    sys.exit(main())
