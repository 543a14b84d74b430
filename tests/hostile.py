"""Values that nobody means to send: any JSON, and good JSON of which one part is hurt."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

Path = tuple[str | int, ...]

SEEDED = settings(
    max_examples=100,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
"""The same examples at every run, few enough for a second or two."""

texts = st.text(max_size=8) | st.sampled_from(["", "\0", "\ud800", "x" * 3000, "../../x", "9" * 30])
numbers = (
    st.integers(-3, 3)
    | st.floats()
    | st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**400, -(10**400), 1e308])
)
leaves = st.none() | st.booleans() | numbers | texts
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def deep(levels: int = 100_000) -> str:
    """JSON that no reader which calls itself can read."""
    return "[" * levels + "]" * levels


def places(value: Any, here: Path = ()) -> list[Path]:
    """The way to every part of a value of JSON, the whole first."""
    found = [here]
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in inside:
            found += places(inner, (*here, key))
    return found


@st.composite
def hurt(draw: st.DrawFn, good: Any) -> Any:
    """`good` with one or two of its parts replaced, left out or doubled."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(places(value)))
        if not place:
            return draw(anything)
        *way, last = place
        parent = value
        for key in way:
            parent = parent[key]
        kind = draw(st.sampled_from(["replace", "replace", "leave out", "double"]))
        if kind == "replace":
            parent[last] = draw(anything)
        elif kind == "leave out":
            del parent[last]
        elif isinstance(parent, list):
            parent.append(parent[last])
    return value
