"""The figures of a case from what was timed, as a table and as one JSON object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.sync.cases import Case, num_bytes
from benchmarks.sync.measure import Counted, Measured
from megarl.weight_sync import compiled

Figures = dict[str, Any]
TARGETS = {
    "publish_over_memcpy": 4.0,
    "copy_over_memcpy": 1.3,
    "verify_over_memcpy": 2.5,
    "sync_over_stock_tensor": 1 / 20,
    "sync_over_stock_distributed": 1 / 3,
}
"""What each ratio is to stay at or below."""


def summary(case: Case, measured: Measured) -> Figures:
    """All figures, by the names that README.md explains. Seconds are medians."""
    syncs = measured.syncs
    memcpy_s = median(sync.memcpy_s for sync in syncs)
    publish_s = median(sync.end - sync.start for sync in syncs)
    tensor_s = median(measured.stock_tensor_s)
    distributed_s = median(measured.stock_distributed_s)
    gather_s = median(measured.gather_s)
    parts = {name: median(part(sync) for sync in syncs) for name, part in PARTS.items()}
    return {
        "publish_over_memcpy": publish_s / memcpy_s,
        "copy_over_memcpy": (parts["stage_s"] + parts["copy_s"]) / memcpy_s,
        "verify_over_memcpy": (parts["check_s"] + parts["verdict_s"]) / memcpy_s,
        "sync_over_stock_tensor": publish_s / tensor_s,
        "sync_over_stock_distributed": publish_s / distributed_s,
        "rollout_stall_s": median(measured.stall_s),
        "case": case.name,
        "num_bytes": num_bytes(case),
        "memcpy_s": memcpy_s,
        "publish_s": publish_s,
        **parts,
        "publish_s_all": [sync.end - sync.start for sync in syncs],
        "memcpy_s_all": [sync.memcpy_s for sync in syncs],
        "stall_s_all": measured.stall_s,
        "stock_tensor_s": tensor_s,
        "stock_distributed_s": distributed_s,
        "gather_s": gather_s,
        "sync_over_gathered_distributed": publish_s / (gather_s + distributed_s),
        "staged_publish_s": median(sync.end - sync.start for sync in measured.staged_syncs),
        "probe_s": median(measured.probe_s),
        **_counted(measured.counted),
        "is_compiled": compiled.find() is not None,
        "load_average": os.getloadavg()[0],
    }


def _counted(found: Counted | None) -> Figures:
    if found is None:
        return {}
    return {
        "learner_calls": list(found.learner_calls),
        "server_calls": list(found.server_calls),
        "http_calls": len(found.routes),
        "handles": found.num_files,
    }


def _time(name: str) -> Any:
    return lambda sync: sync.report["times"][name]


PARTS: Mapping[str, Any] = {
    **{name: _time(name) for name in ("stage_s", "sums_s", "copy_s", "check_s", "verdict_s")},
    "first_token_s": lambda sync: sync.end - sync.start + sync.token_s,
}
"""Parts of a sync that are reported, each from one Sync."""


def table(result: Figures) -> str:
    """For people: where the time goes, each beside a copy of the same bytes."""
    memcpy_s = result["memcpy_s"]
    lines: list[Sequence[str]] = [("", "ms", "/ memcpy", "target")]
    for text, seconds, target in (
        ("memcpy of the same bytes", memcpy_s, ""),
        ("publish: last step to routable", result["publish_s"], "publish_over_memcpy"),
        ("  staging, slowest rank", result["stage_s"], ""),
        ("  copy in the server", result["copy_s"], ""),
        ("  staging and copy", result["stage_s"] + result["copy_s"], "copy_over_memcpy"),
        ("  checksums in the server", result["check_s"], ""),
        ("  checksums in the learner, meanwhile", result["sums_s"], ""),
        ("  from last answer to verdict", result["verdict_s"], ""),
        ("  verification", result["check_s"] + result["verdict_s"], "verify_over_memcpy"),
        ("  where weights are staged first", result["staged_publish_s"], ""),
        ("log-prob probe in the server, besides", result["probe_s"], ""),
        ("publish and one token", result["first_token_s"], ""),
        ("SGLang, update_weights_from_tensor", result["stock_tensor_s"], ""),
        ("SGLang, update_weights_from_distributed", result["stock_distributed_s"], ""),
        ("  gathering whole tensors for either", result["gather_s"], ""),
        ("halt of running responses", result["rollout_stall_s"], ""),
    ):
        wanted = f"<= {TARGETS[target]:.1f}" if target else ""
        lines.append((text, f"{1e3 * seconds:.0f}", f"{seconds / memcpy_s:.2f}", wanted))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    return (
        f"{text}\n\n"
        f"sync / SGLang's: {result['sync_over_stock_tensor']:.4f} (tensor, target <= "
        f"{TARGETS['sync_over_stock_tensor']:.4f}), {result['sync_over_stock_distributed']:.4f} "
        f"(distributed, target <= {TARGETS['sync_over_stock_distributed']:.4f}), "
        f"{result['sync_over_gathered_distributed']:.4f} (distributed, gathering included)\n"
        f"Python calls of a sync: learner ranks {result['learner_calls']}, server ranks "
        f"{result['server_calls']}; {result['http_calls']} HTTP requests; {result['handles']} "
        "files of shared memory mapped by the server"
    )
