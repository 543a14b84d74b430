"""The checks of weight sync on one GPU: `python -m tests.gpu.check`, see `run.sh`.

Needs torch with CUDA, numpy and this repository, and no pytest. Each check prints one line of JSON:
its figures, the targets it missed, its error. Ends with 1 where a check failed or missed a target.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
import traceback

import torch

from tests.gpu.machine import Machine, versions

CHECKS = ("ipc", "export", "checksum", "quantize", "fp8", "copies", "cycle", "offload", "engines")


def run(name: str, machine: Machine) -> dict[str, object]:
    """The line of one check."""
    start = time.perf_counter()
    line: dict[str, object] = {"check": name, "ok": False}
    try:
        outcome = importlib.import_module(f"tests.gpu.check_{name}").run(machine)
        line |= {"ok": not outcome.missed, "missed": outcome.missed, "figures": outcome.figures}
    except Exception as error:  # noqa: BLE001 - said in its line
        traceback.print_exc()
        line["error"] = f"{type(error).__name__}: {error}"[:2000]
    line["took_s"] = round(time.perf_counter() - start, 1)
    if not machine.dry:
        torch.cuda.empty_cache()
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description="weight sync's checks on one GPU")
    parser.add_argument("--dry", action="store_true", help="on a CPU, over a pretended GPU, small")
    parser.add_argument("--gigabytes", type=float, default=15.0, help="of parameters")
    parser.add_argument("--cycles", type=int, default=20, help="of the colocated cycle")
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, with commas")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(CHECKS)
    if unknown:
        parser.error(f"no check is called {sorted(unknown)}; there are {', '.join(CHECKS)}")
    machine = Machine(options.dry, options.gigabytes, options.cycles)
    if not options.dry and not torch.cuda.is_available():
        print("torch sees no GPU: nothing was checked (--dry needs none)", file=sys.stderr)
        return 2
    machine.prepare()
    logging.getLogger("megarl").setLevel(logging.ERROR)  # refusals are part of the checks
    print(json.dumps({"versions": versions(), "dry": options.dry}), flush=True)
    lines = []
    for name in options.only.split(","):
        lines.append(run(name, machine))
        print(json.dumps(lines[-1]), flush=True)
    failed = [line["check"] for line in lines if not line["ok"]]
    print(json.dumps({"ok": not failed, "failed": failed}), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
