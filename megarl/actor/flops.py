"""Floating-point operations of a sequence, estimated from the policy's shape.

Owns the formula by which work is balanced over ranks. Knows nothing of devices or seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.actor.model_shape import ModelShape
from megarl.actor.parameters import Parameter, block_table

OUTSIDE = frozenset({"embedding", "head", "final_norm", "mtp"})  # blocks: no decoder layer
BACKWARD = 2  # of the forward pass: d(input) and d(weight) are a product each, Kaplan 2020, 2.1


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """Of one forward pass: `per_token` of the decoder's linears, `per_prediction` of the output
    layer for a token whose log-prob is needed, `per_pair` of causal attention over T^2 pairs."""

    per_token: float
    per_prediction: float
    per_pair: float

    @classmethod
    def of(cls, shape: ModelShape) -> SequenceFlops:
        """By the matrices of the parameter table: 2 operations for each element and token, of
        routed experts those that a token is sent to.

        Attention's two products take 2 operations for each pair of tokens and each element of a
        query, and of a value; a causal one has half of the pairs. Norms, rotation and softmax are
        left out. Source: Kaplan et al. 2020, 2.1; Dao 2023 (FlashAttention-2), 4.1.
        """
        table = block_table(shape)
        per_kind = {
            kind: sum(_elements_used(parameter, shape) for parameter in parameters)
            for kind, parameters in table.kinds.items()
            if kind not in OUTSIDE
        }
        layers = [block.kind for block in table.blocks if block.kind not in OUTSIDE]
        query, value = shape.head_dim, shape.head_dim
        if shape.mla is not None:
            query = shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim
            value = shape.mla.v_head_dim
        return cls(
            per_token=2.0 * sum(per_kind[kind] for kind in layers),
            per_prediction=2.0 * shape.hidden_size * shape.vocab_size,
            per_pair=float(shape.num_heads * (query + value) * len(layers)),
        )

    def training(self, num_tokens: int, num_predictions: int) -> float:
        """Forward and backward of one sequence of `num_tokens`, for `num_predictions` log-probs.

        >>> SequenceFlops(per_token=10, per_prediction=4, per_pair=1).training(3, 2)
        141.0
        """
        forward = (
            self.per_token * num_tokens
            + self.per_prediction * num_predictions
            + self.per_pair * num_tokens**2
        )
        return float((1 + BACKWARD) * forward)

    def filling(self, num_tokens: int) -> float:
        """Forward and backward of tokens that only fill a microbatch up; of their attention
        nothing is counted, as they are short sequences."""
        return float((1 + BACKWARD) * self.per_token * num_tokens)


def _elements_used(parameter: Parameter, shape: ModelShape) -> float:
    """Elements of a matrix that one token is multiplied with; 0 of a vector."""
    if parameter.stacked:
        assert shape.moe is not None, parameter
        return parameter.num_elements * shape.moe.experts_per_token / shape.moe.num_experts
    return parameter.num_elements if len(parameter.shape) > 1 else 0
