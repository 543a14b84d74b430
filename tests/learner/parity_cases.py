"""Which models and layouts the learner is compared with Hugging Face in: all of 1, 2 and 4 ranks.

Few of them are in the default tests. Where `tp` is above 1, there is sequence parallelism too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.learner.parity import Case

TIED = {"llama"}  # head and embedding are one
EXPERTS = ("qwen3-moe", "deepseek-v3", "moonlight", "glm4-moe")
PLAIN_TP2 = {"tp": 2, "sequence_parallel": False}
VPP2 = {"pp": 2, "vpp": 2}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RECOMPUTED = "qwen3-pp2-dp2-recomputed"

QUICK = {
    "qwen3-tp1": Case("qwen3", variants=True),
    "qwen3-tp2-plain": Case("qwen3", parallel=PLAIN_TP2),
    "qwen3-pp2": Case("qwen3", parallel={"pp": 2}),
    "qwen3-pp2-vpp2": Case("qwen3", parallel=VPP2, variants=True),
    "qwen3-cp2": Case("qwen3", parallel={"cp": 2}, variants=True, max_logits=1000),
    "qwen3-tp2-pp2": Case("qwen3", parallel={"tp": 2, "pp": 2}),
    "qwen3-tp2-cp2": Case("qwen3", parallel={"tp": 2, "cp": 2}),
    "qwen3-tp4": Case("qwen3", parallel={"tp": 4}),
    "qwen3-tp2-dp2": Case("qwen3", dp=2, parallel={"tp": 2}, max_logits=1000),
    RECOMPUTED: Case(
        "qwen3",
        dp=2,
        parallel={"pp": 2},
        more={"kl": {"coef": 0.05}, "correction": {"old_logprobs": "recomputed"}},
    ),
    "qwen3-dp2-overlapped": Case("qwen3", 2, OVERLAPS),
    "llama-tp1": Case("llama"),
    "llama-tp2": Case("llama", parallel={"tp": 2}, max_logits=1000),
    "llama-pp2-vpp2-dp2": Case("llama", dp=2, parallel=VPP2),
    "qwen2-tp1": Case("qwen2"),
    "qwen2-tp2": Case("qwen2", parallel={"tp": 2}),
    "qwen3-moe-tp1": Case("qwen3-moe"),
    "qwen3-moe-ep2-dp2": Case("qwen3-moe", dp=2, parallel={"ep": 2}),
    "qwen3-moe-tp2-ep2": Case("qwen3-moe", parallel={"tp": 2, "ep": 2}),
    "deepseek-v3-tp2-ep2": Case("deepseek-v3", parallel={"tp": 2, "ep": 2}),
    "deepseek-v3-pp2-cp2-ep2-uneven": Case(
        "deepseek-v3", 1, {"pp": 2, "cp": 2, "ep": 2, "pipeline_layout": "Et|tttL"}
    ),
    "glm4-moe-ep2-dp2": Case("glm4-moe", dp=2, parallel={"ep": 2}),
}

_DENSE: tuple[tuple[int, Mapping[str, Any]], ...] = (  # (dp, sizes)
    (1, {}),
    (2, {}),
    (4, {}),
    (1, {"tp": 2}),
    (1, PLAIN_TP2),
    (2, {"tp": 2}),
    (1, {"pp": 2}),
    (2, {"pp": 2}),
    (1, {"pp": 4}),
    (1, VPP2),
    (2, VPP2),
    (1, {"tp": 2, **VPP2}),
    (1, {"cp": 2, **VPP2}),
    (1, {"cp": 2}),
    (1, {"cp": 4}),
    (2, {"cp": 2}),
    (1, {"tp": 2, "pp": 2}),
    (1, {"tp": 2, "cp": 2}),
    (1, {"pp": 2, "cp": 2}),
)
_WITH_EXPERTS: tuple[tuple[int, Mapping[str, Any]], ...] = (
    (1, {}),
    (1, {"tp": 2}),
    (1, {"pp": 2}),
    (1, VPP2),
    (1, {"cp": 2}),
    (2, {"ep": 2}),
    (1, {"tp": 2, "ep": 2}),
    (1, {"tp": 2, "etp": 2}),
    (1, {"cp": 2, "ep": 2}),
    (4, {"ep": 2}),
    (1, {"tp": 2, "pp": 2, "ep": 2}),
    (2, {"tp": 2, "ep": 2}),
    (2, {"tp": 2, "ep": 4}),
    (2, {"tp": 2, "ep": 2, "etp": 2}),
    (1, {"tp": 2, "cp": 2, "ep": 2}),
    (1, {"tp": 2, "cp": 2, "ep": 4}),
    (1, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}),
    (1, {"pp": 2, "cp": 2, "ep": 2}),
    (2, {**VPP2, "ep": 2}),
    (1, {"tp": 2, "ep": 2, **VPP2}),
    (1, {"cp": 2, "ep": 2, **VPP2}),
)


def _name(model: str, dp: int, sizes: Mapping[str, Any]) -> str:
    words = [f"{name}{size}" for name, size in sizes.items() if name != "sequence_parallel"]
    words += ["plain"] if "sequence_parallel" in sizes else []
    words += [f"dp{dp}"] if dp > 1 else []
    return "-".join([model, *(words or ["tp1"])])


def _slow() -> dict[str, Case]:
    tables = {
        "qwen3": _DENSE,
        "llama": _DENSE[:16],
        "qwen2": _DENSE[3:5] + _DENSE[9:14],
        **dict.fromkeys(EXPERTS, _WITH_EXPERTS),
    }
    varied = ({"cp": 2, "ep": 2}, {**VPP2, "ep": 2})
    found = {
        _name(model, dp, sizes): Case(model, dp, sizes, variants=sizes in varied)
        for model, table in tables.items()
        for dp, sizes in table
    }
    found["qwen3-pp2-vpp2-dp2-overlapped"] = Case("qwen3", 2, {**VPP2, **OVERLAPS})
    found["qwen3-moe-tp2-ep2-dp2-overlapped"] = Case("qwen3-moe", 2, {"tp": 2, "ep": 2, **OVERLAPS})
    found["qwen3-pp2-uneven"] = Case("qwen3", parallel={"pp": 2, "first_stage_layers": 1})
    written_out = {"pp": 2, "ep": 2, "pipeline_layout": "Et|tttL"}
    found["deepseek-v3-pp2-ep2-dp2-uneven"] = Case("deepseek-v3", 2, written_out)
    return {name: case for name, case in found.items() if name not in QUICK}


SLOW = _slow()
ALL = {**QUICK, **SLOW}
