"""How long a weight sync takes on real servers, against a copy of memory and SGLang's own ways.

    python benchmarks/weight_sync.py [--case smollm2|moe] [--syncs 9] [--stock-syncs 2] [--json]

Needs no GPU; SmolLM2 must have been fetched (tools/fetch_smollm2.py). The last line printed is one
JSON object; benchmarks/README.md explains its keys.
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

from benchmarks.sync.cases import CASES  # noqa: E402
from benchmarks.sync.measure import measure  # noqa: E402
from benchmarks.sync.report import summary, table  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and the JSON line; the exit status."""
    options = _options(arguments)
    case = CASES[options.case](options.cache)
    measured = measure(case, options.syncs, options.stock_syncs)
    result = summary(case, measured)
    if not options.json:
        print(table(result))
    print(json.dumps(result))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", choices=sorted(CASES), default="smollm2", help="which model")
    parser.add_argument("--syncs", type=int, default=9, help="timed syncs of megarl")
    parser.add_argument("--stock-syncs", type=int, default=2, help="timed syncs of SGLang's ways")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / ".cache", help="folder of fetched models"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
