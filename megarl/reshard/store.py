"""Plans as text, and plans that were made before: written, read back with their proof, and kept.

Owns the form: JSON in which each object that is used many times stands once. What is read is data,
never code, and is proved again before anyone sees it.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from megarl.actor.parameters import Block, BlockTable, Parameter
from megarl.errors import MALFORMED, LayoutError
from megarl.reshard.cells import Pairing, Pieces
from megarl.reshard.layout import BlockLayout, Layout, Padding, Piece, Shard, ShardedTensor, Site
from megarl.reshard.placement import Device, Placement
from megarl.reshard.plan import CHUNK_BYTES, PLANNER, Plan, make_plan
from megarl.reshard.proof import prove_plan
from megarl.reshard.routes import Delivery, Placed, Route, Segment, Traffic

KEPT = 16  # plans in memory; a run has one for each kind of server

_CLASSES: Mapping[str, type] = {
    cls.__name__: cls
    for cls in (
        Block, BlockLayout, BlockTable, Delivery, Device, Layout, Padding, Pairing, Parameter,
        Piece, Pieces, Placed, Placement, Plan, Route, Segment, Shard, ShardedTensor, Site, Traffic,
    )
}  # fmt: skip

_BROKEN = (*MALFORMED, AssertionError, MemoryError)

_kept: OrderedDict[str, Plan] = OrderedDict()


def cached_plan(
    source: Layout,
    destination: Layout,
    placement: Placement | None = None,
    policy_bytes: int = 2,
    chunk_bytes: int = CHUNK_BYTES,
) -> Plan:
    """`make_plan`, or the plan that it made before for layouts and a placement of these digests."""
    placement = placement or Placement.one_node(source, destination)
    sides = [sorted(side.items()) for side in (placement.source, placement.destination)]
    key = repr((source.digest, destination.digest, sides, policy_bytes, chunk_bytes))
    if key not in _kept:
        _kept[key] = make_plan(source, destination, placement, policy_bytes, chunk_bytes)
    _kept.move_to_end(key)
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return _kept[key]


def to_json(plan: Plan) -> str:
    """The plan as text."""
    writer = _Writer()
    root = writer.encode(plan)
    body = {"planner": PLANNER.decode(), "plan": root, "objects": writer.objects}
    return json.dumps({**body, "digest": plan.digest}, separators=(",", ":"))


def from_json(text: str) -> Plan:
    """The plan that `to_json` wrote, proved again.

    Raises LayoutError where the text is none, is of another planner, or was changed.
    """
    try:
        body = json.loads(text)
        if body["planner"] != PLANNER.decode():
            raise LayoutError(
                f"this plan is of {body['planner']!r}, this planner is {PLANNER.decode()!r}; make "
                "the plan again"
            )
        plan = _Reader(body["objects"]).decode(body["plan"])
        if not isinstance(plan, Plan) or plan.digest != body["digest"]:
            raise LayoutError("this plan was changed since it was written; make it again")
        prove_plan(plan)
    except _BROKEN as error:
        raise LayoutError(f"this is no plan ({type(error).__name__}: {error})") from error
    return plan


class _Writer:
    """Values being turned into JSON; `objects` holds each dataclass instance once."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []  # so that no id is used twice

    def encode(self, value: Any) -> Any:
        """JSON for one value."""
        if isinstance(value, str | int | float | bool) or value is None:
            return value
        if isinstance(value, np.ndarray):
            data = base64.b64encode(np.ascontiguousarray(value, "<i8").tobytes()).decode()
            return {"array": list(value.shape), "data": data}
        if isinstance(value, Mapping):
            return {"map": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if is_dataclass(value):
            return {"ref": self._object(value)}
        return [self.encode(item) for item in value]

    def _object(self, value: Any) -> int:
        if id(value) not in self._seen:
            coded = [
                type(value).__name__,
                *(self.encode(getattr(value, f.name)) for f in fields(value)),
            ]
            self._alive.append(value)
            self._seen[id(value)] = len(self.objects)
            self.objects.append(coded)
        return self._seen[id(value)]


class _Reader:
    """JSON being turned back into values; objects are made once, in the order written."""

    def __init__(self, objects: list[Any]) -> None:
        self._made: list[object] = []
        for name, *values in objects:
            self._made.append(_CLASSES[name](*(self.decode(value) for value in values)))

    def decode(self, value: Any) -> Any:
        """The value of some JSON."""
        if isinstance(value, list):
            return tuple(self.decode(item) for item in value)
        if not isinstance(value, dict):
            return value
        if "ref" in value:
            return self._made[value["ref"]]
        if "map" in value:
            return {self.decode(k): self.decode(v) for k, v in value["map"]}
        raw = np.frombuffer(base64.b64decode(value["data"]), "<i8").astype(np.int64)
        return raw.reshape(value["array"])
