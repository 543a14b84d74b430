"""The figures of a row from what was counted and measured, as a table and as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.reshard.awex import AwexPlan
from benchmarks.reshard.closed_form import formula_minimum
from benchmarks.reshard.measure import Measured
from benchmarks.reshard.minimum import Need, count_need, least_busiest, least_busiest_ingress
from benchmarks.reshard.rivals import (
    NIC_BYTES_PER_S,
    Moved,
    broadcast,
    broadcast_8_rails,
    model_bytes,
    shard_p2p,
)
from benchmarks.reshard.rows import GPUS_PER_NODE, Row

TIE = 0.01  # wire bytes that differ by less than this share are a tie

PLAN_HEADS = (
    *("row", "wire TB", "min TB", "ratio", "sender/least", "/mean", "(least)", "NIC in"),
    *("layout s", "plan alone s", "ops s", "plan+ops s", "cpu s", "peak MB"),
    *("awex all s", "x", "awex one s", "x", "awex bytes"),
)
METHOD_HEADS = (
    *("row", "megarl", "shard p2p", "broadcast", "8 rails", "GPU TB: exact", "broadcast"),
    *("into servers, floor s: megarl", "shard p2p", "broadcast", "8 rails"),
    "megarl, senders too",
)

Figures = dict[str, Any]


def row_figures(row: Row, own: Measured, awex: AwexPlan | None) -> Figures:
    """All figures of a row, by the names that README.md explains."""
    source, destination, placement = row.layouts()
    source_nodes = {rank: device.node for rank, device in placement.source.items()}
    nodes = {rank: device.node for rank, device in placement.destination.items()}
    need = count_need(source, destination, source_nodes, nodes)
    formula = None
    if not row.together:
        formula = formula_minimum(row.shape, row.server, GPUS_PER_NODE, row.fp8_block)
    rivals = {
        "broadcast": broadcast(source, destination, nodes),
        "broadcast_8_rails": broadcast_8_rails(destination, nodes),
        "shard_p2p": shard_p2p(need),
    }
    figures: Figures = {
        "row": row.name,
        "learner_gpus": len(source.rank_ids),
        "server_gpus": len(destination.rank_ids),
        "model_bytes": model_bytes(destination),
        "minimum_bytes": need.minimum_bytes,
        "formula_minimum_bytes": formula,
        **_balance(need, own, len(source.rank_ids), nodes),
        "layout_s": own.layout_s,
        "plan_alone_s": own.plan_s,
        "operations_s": own.operations_s,
        "plan_and_operations_s": own.total_s,
        "plan_and_operations_cpu_s": own.cpu_s,
        "runs": own.num_runs,
        "peak_mb": own.peak_bytes / 1e6,
        "num_operations": list(own.plan.num_operations),
        "methods": {name: _method(moved, need.minimum_bytes) for name, moved in rivals.items()},
    }
    if awex is not None:
        figures["awex"] = _beside(figures, awex)
    return figures


def _balance(need: Need, own: Measured, num_senders: int, nodes: Mapping[int, int]) -> Figures:
    """Bytes on the wire and how evenly they are sent and received."""
    out, into = own.plan.network_out, own.plan.network_in
    wire, busiest, busiest_in = (
        sum(out.values()),
        max(out.values(), default=0),
        max(into.values(), default=0),
    )
    least, least_in = least_busiest(need.by_holders), least_busiest_ingress(need, nodes)
    return {
        "wire_bytes": wire,
        "bytes_ratio": ratio(wire, need.minimum_bytes),
        "gpu_bytes_ratio": ratio(own.plan.received_bytes, sum(need.held_bytes.values())),
        "busiest_sender_bytes": busiest,
        "sender_imbalance": ratio(busiest, least),
        "sender_over_mean": ratio(busiest, wire / num_senders),
        "least_sender_over_mean": ratio(least, need.minimum_bytes / num_senders),
        "ingress_imbalance": ratio(busiest_in, least_in),
        "ingress_floor_s": busiest_in / NIC_BYTES_PER_S,
        "floor_s": max(busiest, busiest_in) / NIC_BYTES_PER_S,
        "least_floor_s": max(least, least_in) / NIC_BYTES_PER_S,
    }


def _method(moved: Moved, minimum: int) -> Figures:
    return {
        "wire_bytes": moved.wire_bytes,
        "bytes_ratio": moved.wire_bytes / minimum if minimum else None,
        "gpu_bytes": moved.gpu_bytes,
        "gathered_bytes": moved.gathered_bytes,
        "ingress_floor_s": moved.floor_s,
    }


def _beside(figures: Figures, awex: AwexPlan) -> Figures:
    """awex's figures, and how much longer its planner takes for the same thing."""
    sent = sum(awex.sent_bytes.values())
    busiest = max(awex.sent_bytes.values(), default=0)
    local = min(awex.local_s.values())
    wire = figures["methods"]["shard_p2p"]["wire_bytes"] if awex.cut_off else sent
    return {
        "global_s": awex.global_s,
        "global_cut_off": awex.cut_off,
        "global_runs": awex.num_runs,
        "local_s": awex.local_s,
        "tensors": awex.num_tensors,
        "operations": awex.num_operations,
        "wire_bytes": wire,
        "bytes_ratio": wire / figures["minimum_bytes"] if figures["minimum_bytes"] else None,
        "bytes_are_from_its_plan": not awex.cut_off,
        "tie_on_bytes": abs(wire - figures["wire_bytes"]) <= TIE * figures["wire_bytes"],
        "senders": None if awex.cut_off else len(awex.sent_bytes),
        "busiest_sender_bytes": None if awex.cut_off else busiest,
        "sender_over_mean": None
        if awex.cut_off
        else ratio(busiest, sent / figures["learner_gpus"]),
        "speedup_global": awex.global_s / figures["plan_alone_s"],
        "speedup_local": local / figures["plan_and_operations_s"],
    }


def summary(rows: Sequence[Figures]) -> Figures:
    """The worst of all rows, and the rows."""
    with_awex = [row["awex"] for row in rows if "awex" in row]
    return {
        "max_bytes_ratio": max(row["bytes_ratio"] for row in rows),
        "max_gpu_bytes_ratio": max(row["gpu_bytes_ratio"] for row in rows),
        "max_sender_imbalance": max(row["sender_imbalance"] for row in rows),
        "max_sender_over_mean": max(row["sender_over_mean"] for row in rows),
        "max_ingress_imbalance": max(row["ingress_imbalance"] for row in rows),
        "max_plan_s": max(row["plan_and_operations_s"] for row in rows),
        "max_plan_cpu_s": max(row["plan_and_operations_cpu_s"] for row in rows),
        "max_peak_mb": max(row["peak_mb"] for row in rows),
        "min_speedup_vs_awex": min((a["speedup_global"] for a in with_awex), default=None),
        "min_speedup_vs_awex_local": min((a["speedup_local"] for a in with_awex), default=None),
        "formula_agrees": all(
            row["formula_minimum_bytes"] in (None, row["minimum_bytes"]) for row in rows
        ),
        "rows": list(rows),
    }


def progress(row: Figures) -> str:
    """One line about a row that is done."""
    text = (
        f"{row['row']} ratio={row['bytes_ratio']:.4f} sender={row['sender_imbalance']:.4f} "
        f"plan_alone_s={row['plan_alone_s']:.3f} operations_s={row['operations_s']:.3f} "
        f"cpu_s={row['plan_and_operations_cpu_s']:.3f}"
    )
    if "awex" in row:
        local_s, whole_s = min(row["awex"]["local_s"].values()), row["awex"]["global_s"]
        text += f" awex_all_s={whole_s:.1f} awex_one_s={local_s:.2f}"
    return text


def table(rows: Sequence[Figures]) -> str:
    """Two tables for people: megarl's plan with awex's beside it, and what methods move."""
    first, second = [list(PLAN_HEADS)], [list(METHOD_HEADS)]
    for row in rows:
        first.append([*_plan_cells(row), *_awex_cells(row)])
        second.append(_method_cells(row))
    return "\n\n".join(_aligned(lines) for lines in (first, second))


def _plan_cells(row: Figures) -> list[str]:
    return [
        row["row"],
        f"{row['wire_bytes'] / 1e12:.3f}",
        f"{row['minimum_bytes'] / 1e12:.3f}",
        f"{row['bytes_ratio']:.4f}",
        f"{row['sender_imbalance']:.3f}",
        f"{row['sender_over_mean']:.3f}",
        f"({row['least_sender_over_mean']:.3f})",
        f"{row['ingress_imbalance']:.3f}",
        f"{row['layout_s']:.3f}",
        f"{row['plan_alone_s']:.3f}",
        f"{row['operations_s']:.3f}",
        f"{row['plan_and_operations_s']:.3f}",
        f"{row['plan_and_operations_cpu_s']:.3f}",
        f"{row['peak_mb']:.0f}",
    ]


def _awex_cells(row: Figures) -> list[str]:
    if "awex" not in row:
        return ["-"] * 5
    awex = row["awex"]
    over = ">" if awex["global_cut_off"] else ""
    tie = " tie" if awex["tie_on_bytes"] else ""
    return [
        f"{over}{awex['global_s']:.1f}",
        f"{over}{awex['speedup_global']:.0f}",
        f"{min(awex['local_s'].values()):.2f}",
        f"{awex['speedup_local']:.1f}",
        f"{_times(awex['bytes_ratio'])}{tie}",
    ]


def _method_cells(row: Figures) -> list[str]:
    methods = row["methods"]
    names = ("shard_p2p", "broadcast", "broadcast_8_rails")
    return [
        row["row"],
        f"x{row['bytes_ratio']:.2f}",
        *(_times(methods[name]["bytes_ratio"]) for name in names),
        f"{methods['shard_p2p']['gpu_bytes'] / 1e12:.2f}",
        f"{methods['broadcast']['gpu_bytes'] / 1e12:.2f}",
        f"{row['ingress_floor_s']:.2f}",
        *(f"{methods[name]['ingress_floor_s']:.2f}" for name in names),
        f"{row['floor_s']:.2f}",
    ]


def ratio(value: float, least: float) -> float:
    """value / least; 1 where both are 0, since nothing had to move and nothing did.

    >>> ratio(3, 2), ratio(0, 0), ratio(5, 0)
    (1.5, 1.0, 5.0)
    """
    return value / max(least, 1) if value or least else 1.0


def _times(multiple: float | None) -> str:
    return "-" if multiple is None else f"x{multiple:.2f}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
