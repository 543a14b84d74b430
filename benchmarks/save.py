"""How long training stands still for a checkpoint: waited for, against written beside the steps.

    python benchmarks/save.py [--turns 5] [--ranks 2] [--json]

Needs no GPU. The last line printed is one JSON object; benchmarks/README.md explains its keys.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []  # it may be run as a file
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, in each process

from benchmarks.training import measure  # noqa: E402

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 8192,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and the JSON line; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="timed saves of each way")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = summary(measure.saves(options.turns, options.ranks, SIZES))
    if not options.json:
        for name, value in result.items():
            if name != "turns":
                print(f"{name:24} {value:.3f}")
    print(json.dumps(result))
    return 0


def summary(turns: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians over the turns.

    >>> turn = {"step_s": 1.0, "waited_s": 8.0, "begin_s": 1.5, "end_s": 0.5, "whole_s": 8.0,
    ...         "num_steps": 4, "steps_s": 6.0, "bytes": 3.0}
    >>> found = summary([turn])
    >>> found["still_over_waited"], found["lost_over_waited"]
    (0.25, 0.5)
    """
    rows = [
        {
            **turn,
            "still_s": turn["begin_s"] + turn["end_s"],
            "slowed_s": turn["steps_s"] - turn["num_steps"] * turn["step_s"],
        }
        for turn in turns
    ]
    for row in rows:
        row["still_over_waited"] = row["still_s"] / row["waited_s"]
        row["lost_over_waited"] = (row["still_s"] + row["slowed_s"]) / row["waited_s"]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {**medians, "load_average": os.getloadavg()[0], "turns": rows}


if __name__ == "__main__":
    sys.exit(main())
