"""A plan's copies between nodes as messages: who sends what to whom, in which order.

Owns the members of a server's group and its messages, worked out alike by every member. Knows
nothing of how a message travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.reshard.buckets import Bucket, buckets, message_order
from megarl.reshard.layout import num_elements
from megarl.reshard.moves import Link, Move
from megarl.reshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message: the boxes of `moves` packed in this order, without gaps, in the wire dtype.

    `number` counts the messages from `giver` to `taker`.
    """

    giver: str
    taker: str
    number: int
    moves: tuple[Move, ...]

    @property
    def num_elements(self) -> int:
        """Elements of all boxes."""
        return sum(num_elements(move.box) for move in self.moves)


def learner_member(rank: int) -> str:
    """What a learner rank is called in a group, and in errors."""
    return f"learner rank {rank}"


def server_member(rank: int) -> str:
    """What a server's TP rank is called in a group, and in errors."""
    return f"TP rank {rank}"


def senders(plan: Plan) -> tuple[int, ...]:
    """The learner ranks that send by network."""
    return tuple(sorted(plan.traffic.network_out))


def members(plan: Plan) -> tuple[str, ...]:
    """All that send or take a message of the plan, learner ranks first; empty where nobody does."""
    traffic = plan.traffic
    takers = {*traffic.network_in, *traffic.fanout_in, *traffic.fanout_out}
    return (*map(learner_member, senders(plan)), *map(server_member, sorted(takers)))


def from_learner(plan: Plan, rank: int, bucket_bytes: int) -> tuple[Parcel, ...]:
    """What learner rank `rank` sends by network, in its order."""
    operations = plan.operations_from(rank)
    moves = operations.moves(plan)
    found = buckets(plan, operations, bucket_bytes, "network")
    return tuple(_parcel(bucket, moves, "network") for bucket in found)


def to_server(plan: Plan, rank: int, bucket_bytes: int) -> tuple[Parcel, ...]:
    """What TP rank `rank` gets by network, in its order."""
    operations = plan.operations_to(rank)
    moves = operations.moves(plan)
    found = buckets(plan, operations, bucket_bytes, "network")
    return tuple(_parcel(bucket, moves, "network") for bucket in found)


def inside_node(plan: Plan, rank: int, bucket_bytes: int) -> tuple[Parcel, ...]:
    """What TP rank `rank` gives to and gets from its peers, once all has come by network.

    In the one order of all messages, so that no two ranks wait for each other.
    """
    if rank not in plan.traffic.fanout_in and rank not in plan.traffic.fanout_out:
        return ()
    node = plan.placement.destination[rank].node
    peers = [r for r in plan.traffic.fanout_in if plan.placement.destination[r].node == node]
    found: list[tuple[Bucket, Parcel]] = []
    for peer in peers:
        operations = plan.operations_to(peer)
        moves = operations.moves(plan)
        for bucket in buckets(plan, operations, bucket_bytes, "fanout"):
            if rank in (bucket.source, bucket.destination):
                found.append((bucket, _parcel(bucket, moves, "fanout")))
    order = message_order(plan)
    return tuple(parcel for _, parcel in sorted(found, key=lambda pair: order(pair[0])))


def _parcel(bucket: Bucket, moves: Sequence[Move], link: Link) -> Parcel:
    giver = server_member if link == "fanout" else learner_member
    return Parcel(
        giver(bucket.source),
        server_member(bucket.destination),
        bucket.number,
        tuple(moves[row] for row in bucket.rows),
    )
