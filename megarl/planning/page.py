"""`megarl memory`: what ranks of a learner take, of a run's settings, as a page or as JSON.

Owns the words. Bytes are `memory.py`'s. Starts nothing, and reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from megarl.actor.shape import read_shape
from megarl.config.layouts import critic_settings, learner_layout, learner_mesh, trained_shape
from megarl.config.schema import Config
from megarl.planning.memory import PHASES, RankMemory, full_microbatch, predict, predict_critic
from megarl.reshard.notation import counted
from megarl.reshard.page import bytes_text

LEFT_OUT = (
    "GB are 10^9 bytes. Left out are CUDA contexts, communicators, what the allocator loses, and a",
    "save's host memory. docs/memory.md says what the words mean and what makes it less.",
)


def memory_plan(config: Config, as_json: bool = False) -> str:
    """What is printed: of each pipeline stage its first rank, of the learner and of a critic with
    ranks of its own. `launch.device` = auto is taken as GPUs.

    Raises ModelError where a model cannot be read and LayoutError where it cannot be laid out so.
    """
    on_cpu = config.launch.device == "cpu"
    shape = trained_shape(read_shape(config.actor.model))
    layout = learner_layout(config, shape)
    parts = {"learner": _stages(config, lambda r: predict(config, shape, layout, r, on_cpu))}
    if config.critic_is_apart:
        theirs = critic_settings(config)
        parts["critic"] = _stages(theirs, lambda rank: predict_critic(theirs, rank, on_cpu))
    if as_json:
        return json.dumps({name: [_figures(m) for m in part] for name, part in parts.items()})
    lines: list[str] = []
    for name, stages in parts.items():
        settings = critic_settings(config) if name == "critic" else config
        lines += [*_page(name, settings, stages, on_cpu), ""]
    return "\n".join([*lines, *LEFT_OUT])


def _stages(config: Config, planned: Callable[[int], RankMemory]) -> list[RankMemory]:
    mesh = learner_mesh(config)
    return [planned(stage * mesh.stage_size) for stage in range(mesh.pp)]


def _page(name: str, config: Config, stages: list[RankMemory], on_cpu: bool) -> list[str]:
    mesh, learner = learner_mesh(config), config.learner
    recompute = learner.recompute.granularity
    experts = f"; experts ep {mesh.ep} x etp {mesh.etp}" if mesh.ep * mesh.etp > 1 else ""
    lines = [
        f"{name:<12}{counted(mesh.size, 'rank')}: tp {mesh.tp} x cp {mesh.cp} x dp {mesh.dp} x "
        f"pp {mesh.pp}{experts}; "
        f"{learner.precision.params}; {'CPUs' if on_cpu else 'GPUs'}",
        f"{'microbatch':<12}{full_microbatch(config).tokens} tokens on a rank "
        f"(learner.max_tokens_per_microbatch = {learner.max_tokens_per_microbatch}); "
        f"learner.recompute.granularity = {recompute}",
        "",
    ]
    shown = [name for name in _figures(stages[0]) if name != "offloaded" or _is_colocated(config)]
    rows = [("a rank of", *shown)]
    for number, found in enumerate(stages):
        figures = _figures(found)
        rows.append((f"stage {number}", *(bytes_text(figures[name]) for name in shown)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(f"{t:>{w}}" for t, w in zip(row, widths, strict=True)) for row in rows]
    most = max(max(found.peaks.values()) for found in stages)
    return [*lines, "", f"{'the most':<12}{bytes_text(most)} on a device at one time"]


def _is_colocated(config: Config) -> bool:
    return config.placement.mode == "colocated"


def _figures(found: RankMemory) -> dict[str, int]:
    """Bytes of one rank, by their names on the page."""
    state = found.state
    peaks: dict[str, int] = {name: found.peaks[name] for name in PHASES if name in found.peaks}
    return {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "kept": max(work.kept for work in found.works),
        **peaks,
        "host": found.host.total,
    }
