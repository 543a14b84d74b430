"""The critic's output: one number for each token, in the place of the vocabulary's layer.

Owns the layer and that its gradient is right under tensor and sequence parallelism. Knows nothing
of losses or samples. Import it after `megatron_cpu.install()`.

T packed tokens, S of them on this tensor rank under sequence parallelism (else all), H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn


class ValueHead(nn.Module):
    """Hidden states to values. Every tensor rank has the whole layer, and all have the same.

    Under sequence parallelism each sees its own tokens; Megatron sums the gradients of parameters
    that say so (finalize_model_grads). Without, all see all tokens and have the same gradient.
    """

    def __init__(self, config: Any) -> None:
        """`config` is Megatron's TransformerConfig."""
        super().__init__()
        self._is_scattered = bool(config.sequence_parallel)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = self._is_scattered  # type: ignore[attr-defined]

    def forward(self, hidden_S1H: Tensor) -> Tensor:
        """The value of each token, fp32 [T]. Collective over tensor ranks where they share
        tokens."""
        hidden_SH = hidden_S1H.squeeze(1).float()
        value_S = (hidden_SH @ self.weight.float().t()).squeeze(1) + self.bias.float()
        if not self._is_scattered:
            return value_S
        value_T: Tensor = gather_from_sequence_parallel_region(
            value_S,
            tensor_parallel_output_grad=False,  # all ranks make the same loss of it
        )
        return value_T


def predict_values(
    *, hidden_states: Tensor, output_layer: ValueHead, **unused: object
) -> dict[str, Tensor]:
    """{"value": of each token, fp32 [T]}: Megatron's `output_processor` of the critic."""
    return {"value": output_layer(hidden_states)}
