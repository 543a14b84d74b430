"""Bytes of a trained model's weights, gradients and optimizer state on one learner rank.

Owns Megatron's rule of buffers and their shards, so that a byte here is a byte there. Knows nothing
of activations or phases.

Source: megatron-core 0.19.2, optimizer/distrib_optimizer.py (_compute_per_buffer_param_layout and
_build_model_gbuf_param_range_map), optimizer/param_layout.py and
distributed/distributed_data_parallel.py. The tests compare with real ranks, byte for byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megarl.reshard.layout import LocalTensor
from megarl.reshard.mesh import LearnerMesh

MAIN_BYTES = 4  # of a main gradient, a master and a moment: float32
STEP_BYTES = 4  # of the step that torch's AdamW, a CPU's, keeps for each parameter
PARAMETER_MULTIPLE = 64  # elements; where a parameter begins, param_layout.pad_param_start
BUCKET_MULTIPLE = 128  # elements; what buckets end at besides, param_layout.bucket_end_divisor
LEAST_BUCKET = 40_000_000  # elements, with overlap_grad_reduce, of the first pipeline stage
BUCKET_PER_RANK = 1_000_000

# The order in which Megatron's modules make their parameters. A linear's norm comes before its
# weight in Transformer Engine's; where sizes are multiples of 64 that changes no number here.
_ORDER = tuple(
    re.compile(pattern)
    for pattern in (
        r"embedding\.",
        r"input_layernorm\.",
        r"linear_proj\.",
        r"linear_qkv\.weight",
        r"linear_qkv\.bias",
        r"linear_qkv\.",
        r"linear_q_proj\.",
        r"linear_q_down_proj\.",
        r"linear_q_up_proj\.weight",
        r"linear_q_up_proj\.",
        r"linear_kv_down_proj\.",
        r"linear_kv_up_proj\.weight",
        r"linear_kv_up_proj\.",
        r"q_layernorm\.",
        r"k_layernorm\.",
        r"kv_layernorm\.",
        r"pre_mlp_layernorm\.",
        r"mlp\.router\.",
        r"mlp\.experts\..*linear_fc1\.",
        r"mlp\.experts\..*linear_fc2\.",
        r"mlp\..*linear_fc1\.weight",
        r"mlp\..*linear_fc1\.",
        r"mlp\..*linear_fc2\.",
        r"decoder\.final_layernorm\.",
        r"output_layer\.weight",
        r"output_layer\.",
    )
)
_CHUNK = re.compile(r"model(\d+)\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\d+)$|local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class StateForm:
    """How a trained model is kept: bytes of a weight's element, and what cuts its buffers.

    `overlap` is `learner.parallel.overlap_grad_reduce`, `tied` whether head and embedding are one,
    `on_cpu` whether torch's AdamW is the optimizer. `offload` is the share of the optimizer's state
    that is in host memory always.
    """

    weight_bytes: int
    overlap: bool = False
    tied: bool = False
    on_cpu: bool = False
    offload: float = 0.0


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Of one rank: what a trained model has on the device, and what its optimizer has in host
    memory always."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    optimizer_host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.optimizer_host + other.optimizer_host,
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, end) of a buffer, and where the parameters in it are."""

    start: int
    end: int
    parameters: tuple[tuple[int, int], ...]

    def shard(self, rank: int, ranks: int) -> list[int]:
        """Elements of each parameter that data-parallel rank `rank` of `ranks` updates.

        >>> Bucket(0, 256, ((0, 100), (128, 130))).shard(1, 2)
        [2]
        """
        size = (self.end - self.start) // ranks
        start = self.start + rank * size
        cut = (min(end, start + size) - max(at, start) for at, end in self.parameters)
        return [count for count in cut if count > 0]


def state_bytes(
    tensors: Iterable[LocalTensor], mesh: LearnerMesh, rank: int, form: StateForm
) -> StateBytes:
    """Of a rank that holds the parameters `tensors`, whose names are those of a learner's layout.

    The bytes of the optimizer are those from the first optimizer step on.
    """
    weights = gradients = elements = shards = 0
    for buffer in _buffers(tensors):
        is_expert = ".experts." in buffer[0].name
        ranks = mesh.expert_dp if is_expert else mesh.dp * mesh.cp
        number = _replica(mesh, rank, is_expert)
        is_first = rank < mesh.stage_size
        most = max(LEAST_BUCKET, BUCKET_PER_RANK * mesh.dp) if form.overlap and is_first else None
        sizes = [(math.prod(t.shape), _is_shared(t.name, buffer, mesh, form)) for t in buffer]
        buckets = cut_buckets(sizes, ranks, most)
        weights += buckets[-1].end * form.weight_bytes
        gradients += buckets[-1].end * MAIN_BYTES
        mine = [count for bucket in buckets for count in bucket.shard(number, ranks)]
        elements, shards = elements + sum(mine), shards + len(mine)
    has_masters = form.weight_bytes < MAIN_BYTES or form.offload > 0
    whole = elements * MAIN_BYTES * (3 if has_masters else 2)
    host = math.ceil(whole * form.offload)
    steps = shards * STEP_BYTES if form.on_cpu else 0
    return StateBytes(weights, gradients, whole - host + steps, host)


def cut_buckets(
    sizes: Sequence[tuple[int, bool]], ranks: int, most: int | None = None
) -> list[Bucket]:
    """Where Megatron puts parameters of `sizes` (elements, whether it is a bucket for itself).

    They lie in reverse order. `most` elements fill a bucket; None is one bucket for all.

    >>> cut_buckets([(10, False), (65, False)], ranks=2)
    [Bucket(start=0, end=256, parameters=((0, 65), (128, 138)))]
    >>> [(b.start, b.end) for b in cut_buckets([(10, False), (65, True)], ranks=2)]
    [(0, 128), (128, 256)]
    """
    unit = math.lcm(ranks, BUCKET_MULTIPLE)
    found: list[Bucket] = []
    inside: list[tuple[int, int]] = []
    first = at = 0

    def close(end: int) -> int:
        nonlocal first, inside
        found.append(Bucket(first, _up(end, unit), tuple(inside)))
        first, inside = found[-1].end, []
        return first

    for size, alone in reversed(sizes):
        at = _up(at, PARAMETER_MULTIPLE)
        if alone and inside:
            at = close(at)
        inside.append((at, at + size))
        at += size
        if alone or (most is not None and at - first >= most):
            at = close(at)
    if inside:
        close(at)
    return found


def _buffers(tensors: Iterable[LocalTensor]) -> Iterator[list[LocalTensor]]:
    """The parameters of each buffer, in Megatron's order: of a model chunk, experts apart."""
    found: dict[tuple[int, bool], list[LocalTensor]] = {}
    for tensor in sorted(tensors, key=lambda each: made_when(each.name)):
        chunk = made_when(tensor.name)[0]
        found.setdefault((chunk, ".experts." in tensor.name), []).append(tensor)
    yield from found.values()


def made_when(name: str) -> tuple[int, ...]:
    """Sorts a rank's parameters as its `named_parameters()` has them.

    >>> names = ["output_layer.weight", "decoder.layers.10.mlp.linear_fc2.weight",
    ...     "decoder.layers.9.self_attention.linear_qkv.weight", "embedding.word_embeddings.weight",
    ...     "decoder.layers.9.self_attention.linear_proj.weight"]
    >>> [name.split(".")[-2] for name in sorted(names, key=made_when)]
    ['word_embeddings', 'linear_proj', 'linear_qkv', 'linear_fc2', 'output_layer']
    """
    chunk, layer, expert = _CHUNK.match(name), _LAYER.search(name), _EXPERT.search(name)
    kind = next(i for i, pattern in enumerate(_ORDER) if pattern.search(name))
    if layer is None:
        place = 0 if kind == 0 else 2
    else:
        place = 1
    shared = "shared_experts" in name
    return (
        int(chunk[1]) if chunk else 0,
        place,
        int(layer[1]) if layer else 0,
        int(shared),
        kind,
        int(expert[1] or expert[2]) if expert else 0,
    )


def _is_shared(
    name: str, buffer: Sequence[LocalTensor], mesh: LearnerMesh, form: StateForm
) -> bool:
    """Whether it is one of the two copies of a tied embedding, which have buckets of their own."""
    if not form.tied or mesh.pp == 1:
        return False
    here = [t.name for t in buffer]
    has_embedding = any("embedding." in n for n in here)
    has_head = any("output_layer." in n for n in here)
    return has_embedding != has_head and ("embedding." in name or "output_layer." in name)


def _replica(mesh: LearnerMesh, rank: int, is_expert: bool) -> int:
    """Which of the ranks that hold the same this rank is, as Megatron numbers them."""
    if is_expert:
        return rank % mesh.stage_size // (mesh.ep * mesh.etp)
    return mesh.coordinates(rank)[2]


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
