"""The figures as a table and as one JSON object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Figures = dict[str, Any]
LIMITS = {"step_over_bare_megatron": 1.05, "dp_imbalance": 0.02}
FLOOR = {"packing_efficiency": 0.97}
AGREE = 1e-3  # of gradient norms, relative


def summary(
    steps: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, Any]
) -> Figures:
    """All figures, by the names that README.md explains; ratios of steps are medians of turns."""
    seconds, norms = steps["seconds"], steps["grad_norms"]
    assert abs(norms["megarl"] / norms["bare"] - 1) < AGREE, f"gradients differ: {norms}"
    for key in ("logp", "entropy", "grad"):
        naive, ours = peaks["naive"][key], peaks["megarl"][key]
        assert abs(ours - naive) <= 1e-4 * abs(naive), f"{key} differs: {ours}, {naive}"

    def over(way: str, other: str) -> float:
        return median(a / b for a, b in zip(seconds[way], seconds[other], strict=True))

    return {
        "step_over_bare_megatron": over("megarl", "bare"),
        "packing_efficiency": min(row["efficiency"] for row in rows),
        "dp_imbalance": max(row["imbalance"] for row in rows),
        "logprob_peak_ratio": peaks["megarl"]["peak_bytes"] / peaks["naive"]["peak_bytes"],
        "everywhere_over_bare_megatron": over("megarl_everywhere", "bare"),
        "step_over_padded": over("megarl", "padded"),
        "step_s": {name: median(values) for name, values in seconds.items()},
        "step_s_all": dict(seconds),
        "grad_norms": norms,
        "tokens": steps["tokens"],
        "longest": steps["longest"],
        "logprob_peak_bytes": {way: found["peak_bytes"] for way, found in peaks.items()},
        "packing": list(rows),
        "load_average": os.getloadavg()[0],
    }


def table(result: Figures) -> str:
    """What a person reads."""
    lines = [
        f"{'samples':>8}{'dp':>4}{'budget':>8}{'pipeline':>9}{'microbatches':>13}"
        f"{'real tokens':>12}{'imbalance':>10}{'| in order':>11}{'imbalance':>10}{'| padded':>9}"
    ]
    for row in result["packing"]:
        lines.append(
            f"{row['samples']:>8}{row['data_parallel']:>4}{row['max_tokens']:>8}"
            f"{'yes' if row['is_pipelined'] else 'no':>9}{row['microbatches']:>13}"
            f"{row['efficiency']:>12.2%}{row['imbalance']:>10.2%}"
            f"{row['in_order_efficiency']:>11.2%}{row['in_order_imbalance']:>10.2%}"
            f"{row['padded_efficiency']:>9.2%}"
        )
    lines.append("")
    for way, seconds in result["step_s"].items():
        lines.append(f"{way:<20}{seconds:8.3f} s a step of {result['tokens']} tokens")
    peak = {way: size / 1e6 for way, size in result["logprob_peak_bytes"].items()}
    lines.append(f"log-probs, peak MB: naive {peak['naive']:.0f}, megarl {peak['megarl']:.0f}")
    for name, limit in LIMITS.items():
        lines.append(f"{name:<28}{result[name]:8.4f}  target <= {limit}")
    for name, limit in FLOOR.items():
        lines.append(f"{name:<28}{result[name]:8.4f}  target >= {limit}")
    lines.append(f"{'logprob_peak_ratio':<28}{result['logprob_peak_ratio']:8.4f}")
    lines.append(f"load average {result['load_average']:.1f}")
    return "\n".join(lines)
