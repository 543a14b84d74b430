"""The whole policy as full Hugging Face tensors, brought to learner rank 0 one bucket at a time.

For servers that take tensors by SGLang's own calls. Owns the buckets, which tensors travel in one
of them, and the messages between learner ranks that fill them; where each byte comes from is the
planner's: each is sent once, by one rank. Knows nothing of servers.

What SGLang fuses into one parameter stays in one bucket: its loader of latent attention keeps
q_a_proj and kv_a_proj_with_mqa for one call only, and without the other one it writes neither, and
says nothing (sglang 0.5.23, models/deepseek_common). Experts are loaded one by one, so that an
expert's gate and up stay together, and not all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarl.actor.families import FAMILIES
from megarl.actor.parameters import SCALE_SUFFIX, BlockTable, Parameter, block_table
from megarl.actor.shape import ModelShape
from megarl.errors import WeightSyncError, in_words
from megarl.reshard import execute
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.explicit import explicit_layout
from megarl.reshard.layout import Layout, LocalTensor, Piece, RankLayout, num_elements, whole
from megarl.reshard.placement import Device, Placement
from megarl.reshard.plan import Move
from megarl.reshard.store import cached_plan
from megarl.weight_sync.formats import WireFormat, wire_format
from megarl.weight_sync.together import answering

_GOES_ON, _NOT_WANTED, _FAILED = range(3)


@dataclass(frozen=True, slots=True)
class FullTensor:
    """One tensor of a Hugging Face checkpoint, at byte `offset` of its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FullBucket:
    """Tensors that travel together, one behind the other; wider elements come first."""

    number: int
    tensors: tuple[FullTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def views(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in `data` (uint8 [num_bytes]) by name."""
        return {
            tensor.name: data[tensor.offset : tensor.offset + tensor.num_bytes]
            .view(tensor.dtype)
            .view(tensor.shape)
            for tensor in self.tensors
        }


class FullPolicy:
    """One learner rank's part in bringing the policy to rank 0, again and again.

    `layout` is what the learner sends, `parameters` this rank's live tensors by its local names.
    Tensors are of `dtype` ("fp32" or "bf16"), but those that a checkpoint keeps in float32, and
    what `layout` has as float8 in blocks of `fp8_block`, beside its scales. `group` is a Gloo
    group of all learner ranks in their order; None for one rank alone. `devices` say where the
    ranks are. A tensor larger than `bucket_bytes` is a bucket of its own. MTP layers, which only a
    draft model has, are not among the tensors.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        dtype: str,
        *,
        group: dist.ProcessGroup | None = None,
        devices: Sequence[Device] = (),
        bucket_bytes: int,
        fp8_block: ScaleBlock | None = None,
    ) -> None:
        served = replace(shape, num_mtp_layers=0)
        table, wire = block_table(served, fp8_block), wire_format(dtype, layout)
        self._rank, self._parameters, self._group = rank, parameters, group
        self.buckets = cut_buckets(served, table, wire, bucket_bytes)
        where = Placement(dict(enumerate(devices)), {0: devices[0]}) if devices else None
        plan = cached_plan(layout, checkpoint_layout(table), where, wire.policy.itemsize)
        self._dtypes = {t.name: t.dtype for bucket in self.buckets for t in bucket.tensors}
        place = {
            tensor.name: (bucket.number, position)
            for bucket in self.buckets
            for position, tensor in enumerate(bucket.tensors)
        }
        self._gives = _by_bucket(plan.sends(rank), place, lambda move: move.dst)
        self._takes = _by_bucket(plan.receives(0) if rank == 0 else (), place, lambda m: m.src)

    @property
    def num_bytes(self) -> int:
        """Bytes of the policy as full tensors."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def stream(
        self, wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[FullBucket, torch.Tensor | None]]:
        """Each bucket with, on rank 0, its bytes (uint8, on the CPU); collective over all ranks.

        Rank 0 holds no bucket that it has handed out: whoever takes it lets go of it. It ends early
        on all ranks where rank 0 no longer wants it. WeightSyncError, on every rank, where one
        fails; parameters must not change meanwhile.
        """
        for bucket in self.buckets:
            data, error = self._own(bucket)
            with answering():
                if not self._agreed(error, wanted()):
                    return
                self._exchange(bucket, data)
            yield bucket, data if self._rank == 0 else None
            del data

    def _own(self, bucket: FullBucket) -> tuple[torch.Tensor | None, str]:
        """What this rank has of a bucket, None where that is nothing; text instead of an exception.

        On rank 0 all of the bucket, in which this rank's part is filled in.
        """
        try:
            return self._filled(bucket) if self._rank == 0 else self._packed(bucket), ""
        except Exception as error:  # noqa: BLE001 - raised on all ranks, which would wait for it
            return None, f"learner rank {self._rank}: {in_words(error)}"

    def _packed(self, bucket: FullBucket) -> torch.Tensor | None:
        """The message to rank 0."""
        moves = self._gives.get(bucket.number, {}).get(0)
        if moves is None:
            return None
        data = torch.empty(self._size(moves), dtype=torch.uint8)
        for move, part in self._parts(moves, data):
            part.copy_(execute.read(move, self._parameters).detach())
        return data

    def _filled(self, bucket: FullBucket) -> torch.Tensor:
        """Rank 0: the bucket, with all that needs no message."""
        data = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        views = bucket.views(data)
        for move in self._takes.get(bucket.number, {}).get(0, ()):
            values = execute.read(move, self._parameters).detach()
            execute.written(move, views).copy_(values)
        return data

    def _agreed(self, error: str, wanted: bool) -> bool:
        """Whether all go on. Raises WeightSyncError on every rank where one of them has failed."""
        state = _FAILED if error else _GOES_ON if wanted or self._rank else _NOT_WANTED
        if self._group is not None:
            worst = torch.tensor([state])
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
            state = int(worst)
        if state != _FAILED:
            return state == _GOES_ON
        errors = [error]
        if self._group is not None:
            errors = [""] * dist.get_world_size(self._group)
            dist.all_gather_object(errors, error, group=self._group)
        raise WeightSyncError("the policy was not gathered: " + "; ".join(filter(None, errors)))

    def _exchange(self, bucket: FullBucket, data: torch.Tensor | None) -> None:
        """Send what this rank has, or on rank 0 put together what is sent."""
        if data is None:
            return
        if self._rank != 0:
            dist.send(data, group=self._group, group_dst=0)
            return
        views = bucket.views(data)
        takes = self._takes.get(bucket.number, {})
        for source, moves in sorted((s, m) for s, m in takes.items() if s != 0):
            message = torch.empty(self._size(moves), dtype=torch.uint8)
            dist.recv(message, group=self._group, group_src=source)
            for move, part in self._parts(moves, message):
                view = execute.written(move, views)
                view.copy_(part.view(view.shape))

    def _size(self, moves: Sequence[Move]) -> int:
        return sum(num_elements(move.box) * self._dtypes[move.dst_local].itemsize for move in moves)

    def _parts(
        self, moves: Sequence[Move], data: torch.Tensor
    ) -> Iterator[tuple[Move, torch.Tensor]]:
        """Each move with its part of a message, in the shape of what the source reads."""
        at = 0
        for move in moves:
            dtype = self._dtypes[move.dst_local]
            end = at + num_elements(move.box) * dtype.itemsize
            shape = tuple(stop - start for start, stop in move.box)[
                len(move.box) - move_dims(move) :
            ]
            yield move, data[at:end].view(dtype).view(shape)
            at = end


def move_dims(move: Move) -> int:
    """Dims of what both sides of a move have: `execute.read` and `written` give as many."""
    return min(len(move.src_at), len(move.dst_at))


def checkpoint_layout(table: BlockTable) -> Layout:
    """One rank that holds every tensor of a checkpoint whole, each expert's by itself."""
    tensors, pieces = [], []
    for parameter in table.parameters:
        shape = stored_shape(parameter)
        for expert, name in enumerate(parameter.stored_names()):
            lead = ((expert, expert + 1),) if parameter.stacked else ()
            tensors.append(LocalTensor(name, shape))
            pieces.append(Piece(parameter.name, (*lead, *whole(shape)), name, (0,) * len(shape)))
    rank = RankLayout(0, tuple(tensors), tuple(pieces))
    return explicit_layout("full tensors", table, [rank])


def stored_shape(parameter: Parameter) -> tuple[int, ...]:
    """The shape of a parameter's tensor in a checkpoint, of one expert where it is a stack."""
    return parameter.shape[1:] if parameter.stacked else parameter.shape


def cut_buckets(
    shape: ModelShape, table: BlockTable, wire: WireFormat, bucket_bytes: int
) -> tuple[FullBucket, ...]:
    """All tensors in buckets of at most so many bytes, in the order of the forward pass.

    A block is divided only where it is larger than a bucket, and never inside of what SGLang fuses;
    one such set larger than a bucket is a bucket of its own.
    """
    found: list[FullBucket] = []
    held: list[FullTensor] = []

    def size(tensors: Sequence[FullTensor]) -> int:
        return sum(tensor.num_bytes for tensor in tensors)

    def close() -> None:
        if held:
            held.sort(key=lambda tensor: -tensor.dtype.itemsize)  # stable: all stay aligned
            at, placed = 0, []
            for tensor in held:
                placed.append(replace(tensor, offset=at))
                at += tensor.num_bytes
            found.append(FullBucket(len(found), tuple(placed)))
            held.clear()

    for block in table.blocks:
        parameters = [
            (own.kind, parameter)
            for own, parameter in zip(table.kinds[block.kind], table.of(block), strict=True)
        ]
        sets = _fused_sets(shape, block.kind, parameters, wire)
        if size(held) + sum(map(size, sets)) > bucket_bytes:
            close()
        for together in sets:
            if size(held) + size(together) > bucket_bytes:
                close()
            held += together
    close()
    return tuple(found)


def _fused_sets(
    shape: ModelShape,
    block: str,
    parameters: Sequence[tuple[str, Parameter]],
    wire: WireFormat,
) -> list[list[FullTensor]]:
    """One block's tensors, in their order, in sets that one call must bring together."""
    leader: dict[str, str] = {}  # of each kind, the first kind that SGLang fuses it with
    for held in FAMILIES[shape.architecture].blocks[block].sglang:
        first = next((leader[kind] for kind in held.kinds if kind in leader), held.kinds[0])
        leader.update(dict.fromkeys(held.kinds, first))
    sets: dict[tuple[str, int], list[FullTensor]] = {}
    for kind, parameter in parameters:
        own = wire.of_precision(parameter.precision)
        for number, name in enumerate(parameter.stored_names()):
            expert = number if parameter.stacked else -1
            tensor = FullTensor(name, stored_shape(parameter), own)
            fused = kind.removesuffix(SCALE_SUFFIX)  # scales go where their weights go
            sets.setdefault((leader.get(fused, fused), expert), []).append(tensor)
    return list(sets.values())


def _by_bucket(
    moves: Sequence[Move], place: Mapping[str, tuple[int, int]], peer: Callable[[Move], int]
) -> dict[int, dict[int, list[Move]]]:
    """Moves by bucket and peer, in the order of the bucket's tensors."""
    found: dict[int, dict[int, list[Move]]] = {}
    for move in moves:
        number, _ = place[move.dst_local]
        found.setdefault(number, {}).setdefault(peer(move), []).append(move)
    for peers in found.values():
        for mine in peers.values():
            mine.sort(key=lambda move: place[move.dst_local][1])
    return found
