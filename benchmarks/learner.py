"""How fast a learner step is against a bare Megatron-Core loop, how full its microbatches are, and
what log-probs cost in memory.

    python benchmarks/learner.py [--lengths FILE] [--samples 16] [--steps 8] [--json]

Needs no GPU. The last line printed is one JSON object; benchmarks/README.md explains its keys.
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
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in each process

from benchmarks.training import measure, packing  # noqa: E402
from benchmarks.training.report import summary, table  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and the JSON line; the exit status."""
    options = _options(arguments)
    rows = packing.measure(options.lengths)
    peaks = measure.peaks(options.tokens, options.vocabulary)
    steps = measure.steps(options.samples, options.steps, options.ranks, options.lengths)
    result = summary(steps, rows, peaks)
    if not options.json:
        print(table(result))
    print(json.dumps(result))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--lengths", type=Path, help="JSON lines with question and answer; else drawn like GSM8K's"
    )
    parser.add_argument("--samples", type=int, default=16, help="samples of a timed step")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each way")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks of timed steps")
    parser.add_argument("--tokens", type=int, default=2048, help="positions of the log-probs")
    parser.add_argument("--vocabulary", type=int, default=151936, help="of the log-probs")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
