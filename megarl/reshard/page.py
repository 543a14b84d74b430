"""The page that `megarl reshard explain` prints: figures of a plan, layouts, one tensor's way.

Owns the words and their order. Every number is from `explain.py`, every interval from `trace.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from megarl.reshard.explain import Explanation, Spread
from megarl.reshard.fabric import WORDS, Load
from megarl.reshard.layout import Layout
from megarl.reshard.notation import box_text, describe, elided, offset_text, ranks_text
from megarl.reshard.placement import Device
from megarl.reshard.trace import Copy, HeldPart, Way

WIDTH = 110
LABEL = 12  # columns of what a line is about
DEEP = 4  # columns before a tensor in the notation
ROWS = 64  # of one table of a tensor's way; JSON has all

_TIED = "\u00a0"  # a space at which no line is broken
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def page(explanation: Explanation, headings: Mapping[str, str]) -> str:
    """The plan on one page. `headings` say in words what learner, servers and placement are."""
    lines = _head(explanation, headings)
    lines += ["", *_bytes(explanation), "", *_seconds(explanation)]
    for name, layout in (
        ("learner", explanation.plan.source),
        ("servers", explanation.plan.destination),
    ):
        lines += ["", *_layout(name, layout)]
    return "\n".join(lines)


def _head(explanation: Explanation, headings: Mapping[str, str]) -> list[str]:
    policy = (
        f"{explanation.architecture}, {count_text(explanation.num_parameters)} parameters, "
        f"{bytes_text(explanation.held_bytes)} on the wire where each is sent once"
    )
    lines = _labelled("policy", policy)
    for name, text in headings.items():
        lines += _labelled(name, text)
    for when, words in (("before", "by the learner"), ("after", "by the servers")):
        names = explanation.quantized[when]
        if names:
            lines += _labelled("float8", f"{when} the wire, {words}: {', '.join(names)}")
    return lines


def _bytes(explanation: Explanation) -> list[str]:
    traffic = explanation.traffic
    rows = (
        ("local", "local", "server", "copied on one GPU"),
        ("in nodes", "node_out", "learner", "read from a learner's GPU of the node"),
        ("", "node_in", "server", ""),
        ("network", "network_out", "learner", "once into each node that lacks it"),
        ("", "network_in", "server", ""),
        ("fan-out", "fanout_out", "server", "between GPUs of a node, behind the network"),
        ("", "fanout_in", "server", ""),
    )
    lines = [f"{'bytes':<{LABEL}}{'':<10}{'all':>10}{'busiest rank':>22}{'mean':>11}"]
    for label, name, side, words in rows:
        way = {"out": "given", "in": "taken"}.get(name.partition("_")[2], "copied")
        spread = traffic[name]
        where = f"{bytes_text(spread.busiest)} ({side} {spread.busiest_rank})"
        if not spread.total:
            where = ""
        mean = bytes_text(spread.mean) if spread.total else ""
        line = f"  {label:<{LABEL - 2}}{way:<10}{bytes_text(spread.total):>10}{where:>22}{mean:>11}"
        lines.append(f"{line}  {words}".rstrip())
    if explanation.minimum_bytes:
        least = (
            f"{bytes_text(explanation.minimum_bytes)} must cross the network at least (each byte "
            "once into each node that needs it and does not hold it); moved / minimum "
            f"{explanation.ratio:.4f}"
        )
    else:
        least = "nothing has to cross the network"
    lines += _labelled("minimum", least)
    senders, ingress = traffic["network_out"], traffic["network_in"]
    if explanation.moved_bytes:
        text = (
            f"busiest / mean: senders {senders.balance:.3f}, ingress {ingress.balance:.3f}, "
            "over all ranks of their side (a rank can send only what its pipeline stage holds)"
        )
        lines += _labelled("balance", text)
    lines += _labelled("copies", _copies_text(explanation.received, explanation.sent))
    return lines


def _copies_text(received: Spread, sent: Spread) -> str:
    return (
        f"{received.total:,} boxes in all; into the busiest server rank ({received.busiest_rank}) "
        f"{received.busiest:,}, out of the busiest learner rank ({sent.busiest_rank}) "
        f"{sent.busiest:,}; many can be sent as one"
    )


def _seconds(explanation: Explanation) -> list[str]:
    prediction = explanation.prediction
    fabric, slowest = prediction.fabric, prediction.slowest
    lines = _labelled("plan", f"made and proved in {explanation.plan_s:.2f} s of one core")
    rates = (
        f"{fabric.name} ({fabric.words}): a GPU has {_rate(fabric.nic_bytes_per_s)} of network, "
        f"{_rate(fabric.nvlink_bytes_per_s)} of NVLink each way, "
        f"{_rate(fabric.memory_bytes_per_s)} of memory"
    )
    lines += _labelled("fabric", rates)
    for load in prediction.loads:
        lines.append(f"  {WORDS[load.resource]:<20}{_load_text(load, explanation)}")
    if slowest.busiest_bytes:
        text = (
            f"{seconds_text(prediction.floor_s)} at least: {WORDS[slowest.resource]}, at "
            f"{_who(slowest.busiest, explanation)}; {seconds_text(prediction.serial_s)} where "
            "network, NVLink and memory wait for one another instead of overlapping by chunks. "
            "Floors from data sheets: no start of copies, packing, quantizing or waiting is in them"
        )
    else:
        text = "nothing moves"
    return [*lines, *_labelled("prediction", text)]


def _load_text(load: Load, explanation: Explanation) -> str:
    if not load.busiest_bytes:
        return f"{'-':>10}"
    who = _who(load.busiest, explanation)
    return f"{seconds_text(load.seconds):>10}{bytes_text(load.busiest_bytes):>11}  {who}"


def _who(device: Device, explanation: Explanation) -> str:
    """The ranks on a device, and where it is."""
    placement = explanation.plan.placement
    names = []
    for word, side in (("learner", placement.source), ("server", placement.destination)):
        ranks = [rank for rank, place in side.items() if place == device]
        if ranks:
            names.append(f"{word} {ranks_text(sorted(ranks))}")
    return f"{' and '.join(names)} (node {device.node}, GPU {device.gpu})"


def _layout(name: str, layout: Layout) -> list[str]:
    """The layout in its notation, what each tensor is made of under it."""
    first, *rest = describe(layout).splitlines()
    lines = _wrapped(f"{name} = {first}", "", LABEL)
    for line in rest:
        text = line.strip()
        indent = " " * (len(line) - len(text))
        head, colon, parts = text.partition(": ")
        if len(indent) < DEEP:
            lines += _wrapped(text, indent, len(indent) + LABEL)
            continue
        lines.append(f"{indent}{head}{colon}".rstrip())
        lines += _wrapped(parts, f"{indent}    ", len(indent) + 4)
    return lines


def _wrapped(text: str, indent: str, hanging: int) -> list[str]:
    """Lines that break where two spaces are, and else where they must."""
    whole = "  ".join(part.replace(" ", _TIED) for part in text.split("  "))
    if max(len(part) for part in text.split("  ")) > WIDTH - hanging:
        whole = text
    lines = textwrap.wrap(
        whole,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIED, " ") for line in lines]


def way_page(explanation: Explanation, headings: Mapping[str, str], way: Way) -> str:
    """One tensor's way, by intervals."""
    parameter = way.parameter
    shape = parameter.shape
    title = f"{way.name} {list(shape[1:] if way.expert is not None else shape)}"
    if way.expert is not None:
        title += f", expert {way.expert} of {parameter.name} {list(shape)}"
    if parameter.precision != "policy":
        title += f", {parameter.precision}"
    lines = [*_head(explanation, headings), "", *_labelled("tensor", title)]
    lines += _labelled(
        "", "[a:b] rows, [:, a:b] columns of the whole tensor; @n where they begin in the local one"
    )
    lines += ["", *_parts("held by learner ranks", way.held, shape)]
    if not way.wanted:
        return "\n".join([*lines, "", "no server holds it: it is not sent"])
    lines += ["", *_parts("wanted by server ranks", way.wanted, shape)]
    return "\n".join([*lines, "", *_copies(way.copies, shape)])


def _parts(title: str, parts: Sequence[HeldPart], shape: tuple[int, ...]) -> list[str]:
    locals_ = sorted({part.local for part in parts})
    alone = len(locals_) == 1
    rows = []
    for part in parts:
        place = f"@{offset_text(part.at)}"
        name = [] if alone else [part.local]
        rows.append((_box(part.box, shape), *name, place, ranks_text(part.ranks)))
    return [f"{title}, in {locals_[0]}" if alone else title, *_table(rows)]


def _copies(copies: Sequence[Copy], shape: tuple[int, ...]) -> list[str]:
    """Copies of one box over one link between places of the same name, in a row."""
    ways: dict[tuple[str, str, str, str], list[str]] = {}
    names = {copy.link != "fanout": copy.src_local for copy in copies}
    alone = all(copy.src_local == names[copy.link != "fanout"] for copy in copies)
    for copy in copies:
        key = (
            _box(copy.box, shape),
            copy.link,
            ("" if alone else f"{copy.src_local} ") + f"@{offset_text(copy.src_at)}",
            ("" if alone else f"{copy.dst_local} ") + f"@{offset_text(copy.dst_at)}",
        )
        ways.setdefault(key, []).append(f"{copy.src} -> {ranks_text(copy.ranks)}")
    rows = []
    for (box, link, src, dst), pairs in ways.items():
        sides = "server -> server" if link == "fanout" else "learner -> server"
        rows.append((box, link, f"{src} -> {dst}", sides, "; ".join(elided(pairs))))
    return ["copies", *_table(rows)]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    shown = rows[:ROWS]
    widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))] if shown else []
    lines = [
        "    " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        for row in shown
    ]
    lines = [line.rstrip() for line in lines]
    if len(rows) > ROWS:
        lines.append(f"    ... and {len(rows) - ROWS} more; --json has all")
    return lines


def _box(box: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> str:
    return box_text(box, shape) or "all"


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL
    )


def bytes_text(size: float) -> str:
    """Bytes in decimal units, three digits.

    >>> bytes_text(8241234567890), bytes_text(999), bytes_text(0), bytes_text(33_100_000)
    ('8.24 TB', '999 B', '0', '33.1 MB')
    """
    for factor, unit in _UNITS:
        if size >= factor:
            return f"{_digits(size / factor)} {unit}"
    return f"{size:.0f} B" if size else "0"


def count_text(number: float) -> str:
    """A count in billions, millions or thousands.

    >>> count_text(1026408232448), count_text(1_500_000), count_text(12)
    ('1026 B', '1.50 M', '12')
    """
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{_digits(number / factor)} {unit}"
    return f"{number:.0f}"


def seconds_text(seconds: float) -> str:
    """Seconds, milliseconds or microseconds, three digits.

    >>> seconds_text(1.0123), seconds_text(0.0123), seconds_text(4e-6)
    ('1.01 s', '12.3 ms', '4.00 us')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-6)} us"


def _rate(rate: float) -> str:
    return f"{bytes_text(rate)}/s"


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
