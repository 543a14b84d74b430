"""A comparison of two checkpoints in words, and as plain values. Owns no figure."""

from __future__ import annotations

import math

from megarl.convert.compare import Comparison, Difference
from megarl.convert.formats import Found
from megarl.reshard.notation import box_text

LABEL = 10
SHOWN = 8  # tensors that differ, of which all are in JSON


def page(found: Comparison, left: Found, right: Found) -> str:
    """The comparison in a few lines, the first tensor that differs first."""
    lines = [
        ("A", f"{left.path} ({left.words})"),
        ("B", f"{right.path} ({right.words})"),
        ("names", _names(found)),
        ("shapes", _unlike(found, "shape")),
        ("types", _unlike(found, "dtype")),
        ("digests", f"A {found.digests[0]:016x}, B {found.digests[1]:016x}"),
        ("values", _values(found)),
    ]
    for difference in list(found.differences.values())[:SHOWN]:
        lines.append(("", _one(difference)))
    lines.append(("verdict", "equal" if found.is_equal else "different"))
    return "".join(f"{label:<{LABEL}}{text}\n" for label, text in lines)


def to_dict(found: Comparison) -> dict[str, object]:
    """Plain values for JSON, which has no infinity: null is written for it."""
    return {
        "equal": found.is_equal,
        "num_tensors": len(found.left),
        "only_a": list(found.only[0]),
        "only_b": list(found.only[1]),
        "shapes": {name: _both(found, name, "shape") for name in found.unlike("shape")},
        "types": {name: _both(found, name, "dtype") for name in found.unlike("dtype")},
        "digests": [f"{digest:016x}" for digest in found.digests],
        "differences": [
            {
                "name": difference.name,
                "box": [list(interval) for interval in difference.box],
                "num_elements": difference.num_elements,
                "largest": difference.largest if math.isfinite(difference.largest) else None,
            }
            for difference in found.differences.values()
        ],
    }


def _names(found: Comparison) -> str:
    only_left, only_right = found.only
    if not only_left and not only_right:
        return f"equal, {len(found.left)} tensors"
    parts = [
        f"{len(names)} of {len(side)} only in {which}, first {names[0]}"
        for which, names, side in (("A", only_left, found.left), ("B", only_right, found.right))
        if names
    ]
    return "; ".join(parts)


def _unlike(found: Comparison, what: str) -> str:
    names = found.unlike(what)
    if not names:
        return "equal"
    ours, theirs = _both(found, names[0], what)
    return f"{len(names)} differ, first {names[0]}: A {ours}, B {theirs}"


def _both(found: Comparison, name: str, what: str) -> tuple[object, object]:
    return getattr(found.left[name], what), getattr(found.right[name], what)


def _values(found: Comparison) -> str:
    if not (found.left.keys() & found.right.keys()) - set(found.unlike("shape")):
        return "not compared: no tensor is in both in one shape"
    if found.unlike("shape") or any(found.only):
        read = "of the tensors that both have in one shape, "
    else:
        read = ""
    if not found.differences:
        return f"{read}all equal"
    worst = max(found.differences.values(), key=lambda difference: difference.largest)
    return (
        f"{read}{len(found.differences)} differ, by {worst.largest:.4g} at most, in {worst.name}; "
        "first:"
    )


def _one(difference: Difference) -> str:
    return (
        f"{difference.name}{box_text(difference.box, ())}: {difference.num_elements} elements, by "
        f"{difference.largest:.4g} at most"
    )
