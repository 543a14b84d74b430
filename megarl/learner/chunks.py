"""The model of one rank as one thing: Megatron's DistributedDataParallel of each model chunk.

Owns what is done to all chunks of a pipeline stage alike, and the names of their parameters: those
of the layout, behind `model<v>.` where there are several. Knows nothing of layouts or batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Chunks:
    """The chunks of this rank, in the order that a microbatch passes them; most runs have one."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def _named(self) -> Iterator[tuple[str, Any]]:
        """(key of the chunk, its GPTModel); the key of an only chunk is empty."""
        for index, part in enumerate(self.parts):
            yield (f"model{index}" if len(self.parts) > 1 else ""), part.module

    @property
    def buffers(self) -> list[Any]:
        """Megatron's buffers of parameters and gradients, those of experts apart."""
        return [buffer for part in self.parts for buffer in part.buffers]

    @property
    def expert_parallel_buffers(self) -> list[Any]:
        """The buffers of routed experts."""
        return [buffer for part in self.parts for buffer in part.expert_parallel_buffers]

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """The parameters of all chunks, by the layout's names."""
        for key, module in self._named():
            yield from module.named_parameters(prefix=key)

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        """torch's buffers of all chunks, by the layout's names."""
        for key, module in self._named():
            yield from module.named_buffers(prefix=key)

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig, which all chunks share."""
        return self.parts[0].config

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """The modules of all chunks, by the layout's names."""
        for key, module in self._named():
            yield from module.named_modules(prefix=key)

    def modules(self) -> Iterator[Any]:
        """The modules of all chunks."""
        return (module for _, module in self.named_modules())

    def parameters(self) -> Iterator[Any]:
        """The parameters of all chunks."""
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> None:
        """Make the next forward passes training's, or evaluation's."""
        for part in self.parts:
            part.train(mode)

    def gather_weights(self) -> None:
        """Have every rank hold all of its weights as the last step made them.

        With `overlap_param_gather` a step leaves them in part as they were, until its gathers end.
        """
        for part in self.parts:
            groups = (*part.bucket_groups, *part.expert_parallel_bucket_groups)
            if part.ddp_config.overlap_param_gather and not all(map(_is_gathered, groups)):
                part.start_param_sync(force_sync=True)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad_buffer()

    def offload_grad_buffers(self) -> None:
        """Give the memory of the gradients back."""
        for part in self.parts:
            part.offload_grad_buffers()

    def restore_grad_buffers(self) -> None:
        """Have memory for gradients again; they are zero."""
        for part in self.parts:
            part.restore_grad_buffers()

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Which part of each global tensor this rank holds, in Megatron's words.

        Global names count layers over the whole model, whatever the chunks.
        """
        found = {key: part.sharded_state_dict(metadata=metadata) for key, part in self._named()}
        return found.get("", found)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over tensors that were loaded for what `sharded_state_dict` named."""
        for key, part in self._named():
            part.load_state_dict(state[key] if key else state, strict=True)


def _is_gathered(group: Any) -> bool:
    return group.param_gather_dispatched and group.param_gather_handle is None
