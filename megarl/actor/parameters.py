"""The parameter table: every tensor of the policy under its Hugging Face name, once.

Owns names and global shapes. Knows nothing of where a tensor is held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Kind
from megarl.actor.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the policy. `layer` is None outside the decoder layers."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def parameter_table(shape: ModelShape) -> tuple[Parameter, ...]:
    """All parameters in the order of the forward pass. Tied embeddings are one parameter."""
    names = FAMILIES[shape.architecture].names
    hidden, vocab = shape.hidden_size, shape.vocab_size
    table = [Parameter(names["embedding"].hf, (vocab, hidden), "embedding")]
    per_layer = layer_shapes(shape)
    for layer in range(shape.num_layers):
        for kind, size in per_layer.items():
            table.append(Parameter(names[kind].hf.format(layer=layer), size, kind, layer))
    table.append(Parameter(names["final_norm"].hf, (hidden,), "final_norm"))
    if not shape.tie_embeddings:
        table.append(Parameter(names["head"].hf, (vocab, hidden), "head"))
    return tuple(table)


def layer_shapes(shape: ModelShape) -> dict[Kind, tuple[int, ...]]:
    """Global shapes of one decoder layer's parameters, [output rows, input columns] or [rows]."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[Kind, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "query": (q_rows, hidden),
        "key": (kv_rows, hidden),
        "value": (kv_rows, hidden),
    }
    if shape.qkv_bias:
        shapes |= {"query_bias": (q_rows,), "key_bias": (kv_rows,), "value_bias": (kv_rows,)}
    if shape.qk_norm:
        shapes |= {"query_norm": (shape.head_dim,), "key_norm": (shape.head_dim,)}
    shapes |= {
        "attention_output": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    return shapes
