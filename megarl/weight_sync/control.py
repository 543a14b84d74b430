"""What the sender tells each server rank about one sync, and how SGLang's request carries it.

Owns the control message, the meaning of its digests, and the payload that carries it. Knows
nothing of HTTP, of parameters or of who compares what.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
from megarl.errors import MALFORMED, WeightSyncError
from megarl.float8 import BlockScaling
from megarl.reshard.arena import Slot
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.pipeline import Chunk, Pipeline
from megarl.reshard.placement import Device
from megarl.reshard.precision import quantized_whole
from megarl.reshard.sglang import sglang_layout
from megarl.weight_sync.transport.meeting import Call
from megarl.weight_sync.transport.shared import ArenaRef

LOAD_FORMAT = "megarl.weight_sync.receiver.load"
"""The value of SGLang's --custom-weight-loader, and of `load_format` in every update request."""

WIRE_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Number formats that a sync can carry, by the names of `learner.precision.params`."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Enough to rebuild the learner's layout: the arguments of `megatron_layout`.

    `forms` say how the learner's modules hold attention and experts, `pipeline` which layers each
    stage has, None the even split. With `float8` the weights that servers hold as float8 are
    quantized so before the wire.
    """

    shape: ModelShape
    mesh: LearnerMesh
    vocab_divisor: int = 128
    forms: tuple[str, ...] = ("te", "sequential")
    pipeline: Pipeline | None = None
    float8: BlockScaling | None = None

    def layout(self) -> Layout:
        """What all learner ranks send. Raises LayoutError where they cannot."""
        held = megatron_layout(self.shape, self.mesh, self.vocab_divisor, self.pipeline, self.forms)
        block = self.fp8_block
        if block is None:
            return held
        return quantized_whole(held, block_table(self.shape, block), block)

    def server_layout(self, mesh: ServerMesh) -> Layout:
        """What the ranks of a server hold. Raises LayoutError where there is no such server."""
        return sglang_layout(self.shape, mesh, self.fp8_block)

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns of the blocks of float8 weights."""
        return None if self.float8 is None else (self.float8.rows, self.float8.columns)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SourceSpec:
        """The inverse of `asdict` and JSON. Raises what a broken mapping raises."""
        stages = None if fields["pipeline"] is None else fields["pipeline"]["chunks"]
        return cls(
            ModelShape.from_dict(fields["shape"]),
            LearnerMesh(**fields["mesh"]),
            fields["vocab_divisor"],
            tuple(fields["forms"]),
            None
            if stages is None
            else Pipeline(tuple(tuple(Chunk(**chunk) for chunk in stage) for stage in stages)),
            None if fields["float8"] is None else BlockScaling(**fields["float8"]),
        )


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """One sync of one server, as told to its rank `tp_rank`.

    `attempt` is new for every publish; with `version` it is the arenas' stamp and the weights'
    label. The receiver rebuilds the plan from `source`, `mesh` and the devices of both sides (none:
    one node), and must come to `plan_digest`. `token` comes back in the acknowledgement, which goes
    to the store at `store`. `members` is the group that exchanges messages of at most
    `bucket_bytes`, empty where all is on one node. The receiver has `wait_s` seconds from when it
    gets the message.
    """

    version: int
    attempt: str
    run_id: str
    server: str
    incarnation: int
    tp_rank: int
    source: SourceSpec
    mesh: ServerMesh
    dtype: str
    plan_digest: str
    arenas: Mapping[int, ArenaRef]
    store: tuple[str, int]
    token: str
    source_devices: tuple[Device, ...] = ()
    devices: tuple[Device, ...] = ()
    members: tuple[str, ...] = ()
    bucket_bytes: int = 64 << 20
    wait_s: float = 60.0

    @property
    def call(self) -> Call:
        """The call to the meeting of the group's members."""
        key = meeting_key(self.version, self.attempt, self.server, self.incarnation)
        return Call(self.store, key, self.members, self.busy_key)

    @property
    def stamp(self) -> str:
        """What the arenas must hold, and what the server's weights are called afterwards."""
        return stamp(self.version, self.attempt)

    @property
    def ack_key(self) -> str:
        """Where this rank's acknowledgement belongs."""
        return ack_key(self.version, self.attempt, self.server, self.incarnation, self.tp_rank)

    @property
    def busy_key(self) -> str:
        """There while the sender is at this server, until its last call has been answered."""
        return busy_key(self.version, self.attempt, self.server, self.incarnation)

    @property
    def alone_key(self) -> str:
        """What the server's first rank found of other learners' syncs."""
        return f"{self.busy_key}/alone"

    def to_json(self) -> str:
        """The message as text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ControlMessage:
        """The inverse of `to_json`. Raises WeightSyncError where `text` is not such a message."""
        try:
            fields = json.loads(text)
            fields["source"] = SourceSpec.from_dict(fields["source"])
            fields["mesh"] = ServerMesh(**fields["mesh"])
            fields["arenas"] = {int(r): ArenaRef(**ref) for r, ref in fields["arenas"].items()}
            fields["store"] = (fields["store"][0], int(fields["store"][1]))
            for side in ("source_devices", "devices"):
                fields[side] = tuple(Device(**device) for device in fields[side])
            fields["members"] = tuple(fields["members"])
            return cls(**fields)
        except MALFORMED as error:
            raise WeightSyncError(
                f"{text[:80]!r} is no control message of this version of megarl "
                f"({type(error).__name__}: {error}); use one version in learner and rollout"
            ) from error


def stamp(version: int, attempt: str) -> str:
    """One publish's stamp on arenas and its label of servers' weights.

    >>> stamp(12, "9f00")
    '12.9f00'
    """
    return f"{version}.{attempt}"


def ack_key(version: int, attempt: str, server: str, incarnation: int, tp_rank: int) -> str:
    """The store's key for one rank's acknowledgement of one publish."""
    return f"sync/{version}.{attempt}/{server}.{incarnation}/{tp_rank}"


def sent_key(version: int, attempt: str, server: str, incarnation: int, rank: int) -> str:
    """The store's key for what learner rank `rank` says of its messages to one server."""
    return f"sync/{version}.{attempt}/{server}.{incarnation}/from{rank}"


def busy_key(version: int, attempt: str, server: str, incarnation: int) -> str:
    """The store's key that says that a server's sync is not over."""
    return f"sync/{version}.{attempt}/{server}.{incarnation}/busy"


def meeting_key(version: int, attempt: str, server: str, incarnation: int) -> str:
    """The store's key under which the members of one server's group meet for one publish."""
    return f"sync/{version}.{attempt}/{server}.{incarnation}/meeting"


def arena_digest(
    plan_digest: str, dtype: str, rank: int, slots: Mapping[str, Slot], num_bytes: int
) -> str:
    """64 hex digits over all that gives an arena's bytes their meaning."""
    places = [(name, *astuple(slot)) for name, slot in sorted(slots.items())]
    meaning = json.dumps([plan_digest, dtype, rank, places, num_bytes])
    return hashlib.sha256(meaning.encode()).hexdigest()


class _OneByte:
    """Pickles as `torch.ByteTensor([0])`.

    SGLang wants a tensor beside each name, and unpickles only what is on its list. A real tensor's
    pickle names torch's storage loader, which `import megatron.core` replaces by a function that
    is not on the list, and then the server ends.
    """

    def __reduce__(self) -> tuple[object, tuple[list[int]]]:
        return torch.ByteTensor, ([0],)


def encode(message: ControlMessage) -> str:
    """One entry of `serialized_named_tensors`: base64; the message is a tensor's name."""
    return base64.b64encode(pickle.dumps([(message.to_json(), _OneByte())])).decode("ascii")


def decode(named_tensors: Sequence[tuple[str, object]]) -> ControlMessage:
    """The message in what SGLang hands to its loader; WeightSyncError where there is none."""
    if len(named_tensors) != 1 or not isinstance(named_tensors[0][0], str):
        raise WeightSyncError(
            f"an update request with {len(named_tensors)} tensors is not megarl's; the loader "
            f"{LOAD_FORMAT} takes its own control message only"
        )
    return ControlMessage.from_json(named_tensors[0][0])
