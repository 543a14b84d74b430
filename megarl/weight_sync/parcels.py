"""A plan's copies between nodes as messages: who sends what to whom, in which order.

Owns the members of a server's group and its messages, worked out alike by every member. Knows
nothing of how a message travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.actor.parameters import element_bytes
from megarl.reshard.buckets import Bucket, buckets, message_order
from megarl.reshard.moves import LINKS, Link, Move, Operations
from megarl.reshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message: the boxes of `moves` packed in this order, without gaps, each as it travels.

    Boxes of wide elements come first, so that each begins at a multiple of its element. `number`
    counts the messages from `giver` to `taker`.
    """

    giver: str
    taker: str
    number: int
    moves: tuple[Move, ...]
    num_bytes: int


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
    found = _parcels(plan, plan.operations_from(rank), bucket_bytes, "network")
    return tuple(parcel for _, parcel in found)


def to_server(plan: Plan, rank: int, bucket_bytes: int) -> tuple[Parcel, ...]:
    """What TP rank `rank` gets by network, in its order."""
    found = _parcels(plan, plan.operations_to(rank, ["network"]), bucket_bytes, "network")
    return tuple(parcel for _, parcel in found)


def inside_node(plan: Plan, rank: int, bucket_bytes: int) -> tuple[Parcel, ...]:
    """What TP rank `rank` gives to and gets from its peers, once all has come by network.

    In the one order of all messages, so that no two ranks wait for each other.
    """
    traffic, where = plan.traffic, plan.placement.destination
    found = []
    if rank in traffic.fanout_in:
        found += _parcels(plan, plan.operations_to(rank, ["fanout"]), bucket_bytes, "fanout")
    if rank in traffic.fanout_out:
        for peer in traffic.fanout_in:
            if peer != rank and where[peer].node == where[rank].node:
                theirs = plan.operations_to(peer, ["fanout"])
                mine = theirs.where(theirs.source == rank)
                found += _parcels(plan, mine, bucket_bytes, "fanout")
    order = message_order(plan)
    return tuple(parcel for _, parcel in sorted(found, key=lambda pair: order(pair[0])))


def _parcels(
    plan: Plan, operations: Operations, bucket_bytes: int, link: Link
) -> list[tuple[Bucket, Parcel]]:
    """The messages over `link`, with the buckets that they are."""
    mine = operations.where(operations.link == LINKS.index(link))
    moves = mine.moves(plan)
    wide = {p.name: -element_bytes(p, plan.policy_bytes) for p in plan.destination.parameters}
    giver = server_member if link == "fanout" else learner_member
    return [
        (
            bucket,
            Parcel(
                giver(bucket.source),
                server_member(bucket.destination),
                bucket.number,
                tuple(sorted((moves[row] for row in bucket.rows), key=lambda m: wide[m.tensor])),
                bucket.num_bytes,
            ),
        )
        for bucket in buckets(plan, mine, bucket_bytes, link)
    ]
