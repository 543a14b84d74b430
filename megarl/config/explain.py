"""`megarl reshard explain`: the plan of a run's settings, as a page or as JSON.

Owns the words that settings add to the figures: what is laid out, and where. Moves nothing.
"""

from __future__ import annotations

import json
import time

from megarl.config.layouts import RunLayouts, run_layouts
from megarl.config.schema import Config
from megarl.config.served import served_block
from megarl.reshard.explain import explain, way_to_dict
from megarl.reshard.fabric import Fabric
from megarl.reshard.notation import counted, ranks_text
from megarl.reshard.page import page, way_page
from megarl.reshard.plan import make_plan
from megarl.reshard.trace import trace


def explain_run(
    config: Config,
    tensor: str | None,
    fabric: Fabric,
    gpus_per_node: int | None = None,
    as_json: bool = False,
) -> str:
    """What is printed. Without `gpus_per_node` the fabric's.

    Raises LayoutError where the model cannot be laid out so, and where no tensor is so named.
    """
    per_node = gpus_per_node or fabric.gpus_per_node
    run = run_layouts(config, per_node)
    start = time.process_time()
    plan = make_plan(run.source, run.destination, run.placement, run.policy_bytes)
    taken_s = time.process_time() - start
    explanation = explain(plan, taken_s, run.shape.architecture, run.decisions, fabric)
    way = None if tensor is None else trace(plan, tensor)
    if not as_json:
        headings = _headings(config, run, per_node)
        return page(explanation, headings) if way is None else way_page(explanation, headings, way)
    figures = explanation.to_dict()
    figures["placement"] |= {"mode": config.placement.mode, "gpus_per_node": per_node}
    figures["learner"] |= _learner_sizes(run)
    figures["servers"] |= _server_sizes(run)
    if way is not None:
        figures["tensor"] = way_to_dict(way)
    return json.dumps(figures)


def _headings(config: Config, run: RunLayouts, gpus_per_node: int) -> dict[str, str]:
    learner, server = run.learner, run.server
    sizes = _learner_sizes(run)
    experts = ""
    if run.shape.moe is not None:
        experts = f"; experts ep {learner.ep} x etp {learner.etp} x {learner.expert_dp} replicas"
    words = " x ".join(f"{name} {sizes[name]}" for name in ("tp", "cp", "dp", "pp"))
    chunks = f", vpp {learner.vpp}" if learner.vpp > 1 else ""
    rest = [f"ep {server.ep}"] if run.shape.moe is not None else []
    rest += [f"pp {server.pp}"] if server.pp > 1 else []
    rest += [f"{server.attention_dp} copies of the attention"] if server.attention_dp > 1 else []
    precision: str = config.learner.precision.params
    block = served_block(config)
    if block is not None:
        precision = f"float8 in blocks of {block[0]} x {block[1]}, bf16 beside it"
    inside = f"tp {server.tp}" + "".join(f", {text}" for text in rest)
    return {
        "learner": f"{counted(learner.size, 'rank')}: {words}{chunks}{experts}; "
        f"{config.learner.precision.params}",
        "servers": f"{counted(server.servers * server.size, 'rank')}: "
        f"{counted(server.servers, 'server')} of {server.size}: {inside}; {precision}",
        "placement": _placement(config, run, gpus_per_node),
    }


def _placement(config: Config, run: RunLayouts, gpus_per_node: int) -> str:
    source, destination = run.placement.source, run.placement.destination
    if config.launch.device == "cpu":
        return (
            "processes of one machine (launch.device = cpu); each counts as a GPU, and seconds are "
            "what the fabric would take"
        )
    ours = {device.node for device in source.values()}
    theirs = {device.node for device in destination.values()}
    where = f"{gpus_per_node} GPUs a node"
    if config.placement.mode == "colocated":
        return f"colocated, {where}: {_nodes(ours | theirs)}"
    return f"apart, {where}: learner on {_nodes(ours)}, servers on {_nodes(theirs)}"


def _nodes(numbers: set[int]) -> str:
    return f"{'node' if len(numbers) == 1 else 'nodes'} {ranks_text(sorted(numbers))}"


def _learner_sizes(run: RunLayouts) -> dict[str, int]:
    mesh = run.learner
    return {name: getattr(mesh, name) for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")}


def _server_sizes(run: RunLayouts) -> dict[str, int]:
    mesh = run.server
    return {name: getattr(mesh, name) for name in ("servers", "tp", "ep", "pp", "attention_dp")}
