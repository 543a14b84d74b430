"""Change a folder's code in many small ways and count the changes that its tests notice.

    make mutation ARGS="--folder megarl/reshard --seed 1 --sample 150"  # docs/testing.md

The tests are the default ones of tests/FOLDER and the examples in FOLDER that pass where neither
SGLang nor Megatron can be imported. A mutant gets the tests that ran its line, until one fails.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections import Counter
from pathlib import Path

from tools.mutation.baseline import Baseline
from tools.mutation.runs import Copy
from tools.mutation.sites import draw, mutants
from tools.mutation.trials import KILLED, TIMED_OUT, Trials


def main() -> None:
    """Draw, measure, try, and tell."""
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="such as megarl/reshard")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=150, help="how many mutants to draw")
    parser.add_argument("--only", type=int, nargs="*", help="try these numbers of the sample")
    parser.add_argument("--tests", nargs="*", help="these files of tests, where not all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of tests for a mutant")
    parser.add_argument("--measured", default="", help="a folder to keep the first run of tests in")
    parser.add_argument("--out", default="", help="a file that gets a JSON line for each mutant")
    args = parser.parse_args()
    os.nice(19)
    root = Path(__file__).parents[2]
    args.out = args.out and os.path.abspath(args.out)
    kept = args.measured and os.path.abspath(args.measured)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(Path(folder))
        measured = Path(kept or copy.folder / "coverage")
        copy.make(root)
        copy.warm()
        os.chdir(copy.tree)
        sources = sorted(Path(args.folder).rglob("*.py"))
        sample = draw([m for path in sources for m in mutants(str(path))], args.seed, args.sample)
        files = sorted(Path("tests", *Path(args.folder).parts[1:]).rglob("test_*.py"))
        files += [path for path in sources if ">>> " in path.read_text(encoding="utf-8")]
        baseline = Baseline()
        for file in args.tests or files:
            baseline.add(copy, str(file), args.folder, measured)
        wanted = {n: m for n, m in enumerate(sample) if args.only is None or n in args.only}
        counts = Counter(Trials(copy, baseline, args.seconds, args.out).run(wanted))
        killed = counts[KILLED] + counts[TIMED_OUT]
        print(f"{args.folder}: {killed} of {counts.total()} killed; {dict(counts)}")


if __name__ == "__main__":
    main()
