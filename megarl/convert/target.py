"""What a conversion writes, whatever its format: files, and the tensors that each is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.convert.stored import Stored
from megarl.reshard.layout import Layout
from megarl.reshard.shard_files import TensorToStore

Tensors = Iterable[tuple[str, Stored]]
"""The tensors of a file to write by their local names, in order."""

Tell = Callable[[int], None]
"""Takes how many bytes more are written."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to write: the tensors to assemble for it, in order, and its size.

    In torch_dist, what is around the tensors does not count.
    """

    name: str
    tensors: Mapping[str, TensorToStore]
    num_bytes: int


class Target(Protocol):
    """A checkpoint to write. Rank i of `layout` is `files[i]`, whose tensors are its local ones.

    Files beyond the layout's ranks are of what is kept as the source has it.
    """

    layout: Layout
    files: tuple[TargetFile, ...]

    def kept(self, number: int) -> Tensors:
        """The tensors of a file beyond the layout's ranks."""

    def write(self, folder: Path, number: int, tensors: Tensors, tell: Tell) -> Any:
        """Write file `number` of what is assembled, down to the disk; what `finish` needs of it.

        That is plain values for JSON. It tells of the bytes that are written, `num_bytes` in all.
        Raises OSError.
        """

    def finish(self, folder: Path, receipts: Sequence[Any]) -> None:
        """Write what makes the files a checkpoint. Raises OSError."""
