"""The minimum by formula, where one is easy: a second opinion on megarl.reshard.minimum.

For servers without pipeline stages and attention data-parallelism, on nodes of their own that they
fill or that they share evenly. It reads the model's table and the mesh, and no layout.
"""

from __future__ import annotations

from fractions import Fraction

from megarl.actor.parameters import SCALE_SUFFIX, Parameter, block_table, element_bytes
from megarl.actor.shape import ModelShape
from megarl.reshard.mesh import ServerMesh

EVERYWHERE = frozenset(
    "attention_norm mlp_norm final_norm query_norm key_norm router router_bias query_down "
    "query_down_norm kv_down kv_down_norm".split()
)
"""Kinds of tensors that every rank of a server holds whole."""

KEYS_VALUES = frozenset(("key", "value", "key_bias", "value_bias"))


def formula_minimum(
    shape: ModelShape,
    mesh: ServerMesh,
    gpus_per_node: int = 8,
    fp8_block: tuple[int, int] | None = None,
) -> int | None:
    """Bytes that must enter the servers' nodes, or None where no formula is written for the mesh.

    What is cut over tp enters a server once, however many nodes it has; what every rank holds
    enters once per node; of k key heads a node of a larger server holds gpus * k / tp, at least 1.
    """
    per_node, gpus = Fraction(gpus_per_node, mesh.tp), gpus_per_node
    if mesh.attention_dp > 1 or mesh.pp > 1 or mesh.servers * mesh.tp % gpus:
        return None
    if max(per_node, 1 / per_node).denominator != 1:
        return None
    nodes = mesh.servers * mesh.tp // gpus
    total = Fraction(0)
    table = block_table(shape, fp8_block)
    for block in table.blocks:
        for parameter in table.kinds[block.kind]:
            share = _share_of_node(parameter, shape.num_kv_heads, per_node)
            total += nodes * share * parameter.num_elements * element_bytes(parameter, 2)
    return int(total)


def _share_of_node(parameter: Parameter, num_kv_heads: int, per_node: Fraction) -> Fraction:
    """The part of a parameter that the ranks of one node hold between them."""
    kind = parameter.kind.removesuffix(SCALE_SUFFIX)
    if kind in EVERYWHERE:
        return Fraction(1)
    if kind in KEYS_VALUES:
        return min(Fraction(1), max(per_node, Fraction(1, num_kv_heads)))
    return min(Fraction(1), per_node)
