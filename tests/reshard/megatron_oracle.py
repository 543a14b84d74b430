"""Megatron's own functions for layers and ranks, in a process of their own, asked line by line.

`main` is that process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from typing import Any

from megarl.reshard.mesh import LearnerMesh
from tests.megatron_engine import Engine


class Oracle:
    """The process that answers."""

    def __init__(self, engine: Engine) -> None:
        self._process = engine.start("tests.reshard.megatron_oracle")

    def chunks(
        self, num_layers: int, pp: int, vpp: int, num_mtp: int = 0, **settings: object
    ) -> Any:
        """[p][v] -> [first layer, end, MTP layers], or the name of Megatron's error."""
        case = {"num_layers": num_layers, "pp": pp, "vpp": vpp, "num_mtp": num_mtp}
        return self._ask({**case, "settings": settings})

    def groups(self, mesh: LearnerMesh) -> dict[str, list[list[int]]]:
        """The ranks of each group: "dense" and "experts" are replicas, the others an axis each."""
        sizes = {axis: getattr(mesh, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "etp")}
        return self._ask({**sizes, "expert_dp": mesh.expert_dp})  # type: ignore[no-any-return]

    def defaults(self) -> dict[str, str]:
        """The defaults, by repr, of MLATransformerConfig, which has all fields there are."""
        return self._ask({"defaults": True})  # type: ignore[no-any-return]

    def _ask(self, case: dict[str, object]) -> Any:
        self._process.write(json.dumps(case) + "\n")
        self._process.flush()
        return json.loads(self._process.readline())

    def close(self) -> None:
        """End the process."""
        self._process.close()


def chunks(case: dict[str, Any]) -> list[list[list[int]]]:
    """Layers and MTP layers of every chunk, as Megatron's own functions count them."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    pp, vpp = case["pp"], case["vpp"] if case["vpp"] > 1 else None
    config = TransformerConfig(
        num_layers=case["num_layers"],
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        pipeline_dtype="bf16",
        virtual_pipeline_model_parallel_size=vpp,
        mtp_num_layers=case["num_mtp"] or None,
        **case["settings"],
    )
    state.set_pipeline_model_parallel_world_size(pp)
    state.set_virtual_pipeline_model_parallel_world_size(vpp)
    found = []
    for p in range(pp):
        state.set_pipeline_model_parallel_rank(p)
        row = []
        for v in range(case["vpp"]):
            at = {"vp_stage": v if vpp else None, "pp_rank": p}
            first = get_transformer_layer_offset(config, **at)
            size = get_num_layers_to_build(config, **at)
            row.append([first, first + size, get_mtp_num_layers_to_build(config, **at)])
        found.append(row)
    return found


def groups(case: dict[str, int]) -> dict[str, list[list[int]]]:
    """Ranks of groups, by the two generators of initialize_model_parallel."""
    from megatron.core.parallel_state import RankGenerator

    pp, order = case["pp"], "tp-cp-ep-dp-pp"
    dense = RankGenerator(case["tp"], 1, case["dp"], pp, case["cp"], order)
    experts = RankGenerator(case["etp"], case["ep"], case["expert_dp"], pp, 1, order)
    return {
        "dense": dense.get_ranks("dp-cp"),
        "tp": dense.get_ranks("tp"),
        "pp": dense.get_ranks("pp"),
        "experts": experts.get_ranks("dp"),
        "ep": experts.get_ranks("ep"),
        "etp": experts.get_ranks("tp"),
    }


def defaults() -> dict[str, str]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return {field.name: repr(field.default) for field in dataclasses.fields(MLATransformerConfig)}


def answer_to(case: dict[str, Any]) -> object:
    if "defaults" in case:
        return defaults()
    return chunks(case) if "settings" in case else groups(case)


def main() -> None:
    warnings.simplefilter("ignore")
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        case = json.loads(line)
        try:
            answer: object = answer_to(case)
        except (AssertionError, ValueError, ZeroDivisionError) as error:
            answer = type(error).__name__
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
