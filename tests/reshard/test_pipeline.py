"""Pipelines against the functions by which Megatron itself numbers its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megarl.errors import LayoutError
from megarl.reshard.pipeline import Pipeline
from tests.reshard.megatron_oracle import Oracle


def placed(pipeline: Pipeline) -> list[list[list[int]]]:
    """The pipeline as the oracle answers; a chunk without layers begins where Megatron says."""
    return [[[c.first, c.end, c.num_mtp] for c in stage] for stage in pipeline.chunks]


def ours(make: Callable[[], Pipeline]) -> object:
    try:
        return placed(make())
    except LayoutError:
        return "refused"


def assert_alike(mine: object, megatrons: Any) -> None:
    """The same layers everywhere, or both refuse.

    With more layers in the first or last stage than there are, Megatron gives negative numbers.
    """
    broken = isinstance(megatrons, str) or any(
        first > end for stage in megatrons for first, end, _ in stage
    )
    if broken:
        assert mine == "refused", megatrons
    else:
        assert mine == megatrons


QUICK = settings(
    max_examples=150, phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink]
)
STAGES = st.integers(1, 6)
CHUNKS = st.integers(1, 3)


@QUICK
@given(st.data(), STAGES, CHUNKS, st.integers(0, 2), st.booleans(), st.booleans())
def test_even_split_is_megatrons(
    megatron: Oracle,
    data: st.DataObject,
    pp: int,
    vpp: int,
    num_mtp: int,
    embedding: bool,
    loss: bool,
) -> None:
    vpp = vpp if pp > 1 else 1
    fitting = data.draw(st.integers(1, 3)) * pp * vpp - embedding - loss
    num_layers = data.draw(st.sampled_from([max(1, fitting), data.draw(st.integers(1, 30))]))
    mine = ours(
        lambda: Pipeline.even(
            num_layers, pp, vpp, num_mtp=num_mtp, embedding_counts=embedding, loss_counts=loss
        )
    )
    theirs = megatron.chunks(
        num_layers,
        pp,
        vpp,
        num_mtp,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )
    assert_alike(mine, theirs)


@QUICK
@given(st.data(), STAGES, CHUNKS)
def test_uneven_split_is_megatrons(
    megatron: Oracle, data: st.DataObject, pp: int, vpp: int
) -> None:
    vpp = vpp if pp > 1 else 1
    some = st.none() | st.integers(0, 8) | st.integers(1, 3).map(lambda n: n * vpp)
    first, last = data.draw(some), data.draw(some)
    if first is None and last is None:
        first = vpp
    given_stages = (first is not None) + (last is not None)
    if pp < given_stages:
        return  # Megatron takes one stage for two there, without an error
    middle = (pp - given_stages) * vpp * data.draw(st.integers(1, 3))
    fitting = max(1, (first or 0) + (last or 0) + middle)
    num_layers = data.draw(st.sampled_from([fitting, data.draw(st.integers(1, 30))]))
    mine = ours(lambda: Pipeline.uneven(num_layers, pp, first, last, vpp))
    theirs = megatron.chunks(
        num_layers,
        pp,
        vpp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    assert_alike(mine, theirs)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, str, int]:
    """(layout string, the same without repetitions, pp); some of them are wrong."""
    pp, vpp = draw(STAGES), draw(CHUNKS)
    bodies = [
        draw(st.sampled_from(["", "t", "tt", "ttt"])) for _ in range(pp * (vpp if pp > 1 else 1))
    ]
    if draw(st.booleans()):
        bodies[-draw(st.integers(1, min(pp, len(bodies))))] += "m" * draw(st.integers(1, 2))
    bodies[0], bodies[-1] = "E" + bodies[0], bodies[-1] + "L"
    plain = "|".join(bodies)
    if draw(st.integers(0, 5)) == 0:  # one symbol too many, too few, or another one
        at = draw(st.integers(0, len(plain) - 1))
        plain = (
            plain[:at] + draw(st.sampled_from(["", "E", "L", "m", "t", "|", "x"])) + plain[at + 1 :]
        )
    return draw(compressed(plain)), plain, pp


@st.composite
def compressed(draw: st.DrawFn, plain: str) -> str:
    """The same layout with some repetitions written as such, and commas."""
    text, at = "", 0
    while at < len(plain):
        unit = plain[at : at + draw(st.integers(1, 3))]
        copies = 1
        while plain.startswith(unit, at + copies * len(unit)):
            copies += 1
        copies = draw(st.integers(1, copies))
        if copies == 1 and draw(st.booleans()):
            text += unit
        else:
            text += (f"({unit})" if len(unit) > 1 or draw(st.booleans()) else unit) + f"*{copies}"
        text += draw(st.sampled_from(["", "", ","]))
        at += copies * len(unit)
    return text


@QUICK
@given(layouts())
def test_written_layout_is_megatrons(megatron: Oracle, case: tuple[str, str, int]) -> None:
    layout, plain, pp = case
    chunks = plain.count("|") + 1
    if not plain.startswith("E") or not plain.endswith("L"):
        return
    home = plain[: plain.find("m")].count("|") if "m" in plain else 0
    if pp > 1 and home > 0 and home % pp == 0:
        return  # Megatron accepts this layout and hangs when it builds the model
    theirs = megatron.chunks(
        plain.count("t"),
        pp,
        max(1, chunks // pp),
        plain.count("m"),
        pipeline_model_parallel_layout=layout,
    )
    assert_alike(ours(lambda: Pipeline.from_layout(layout, pp)), theirs)


def test_deepseeks_published_layout_is_megatrons(megatron: Oracle) -> None:
    layout = "Et*3|(tt|)*29,m|L"
    mine = placed(Pipeline.from_layout(layout, 16))
    assert mine == megatron.chunks(61, 16, 2, 1, pipeline_model_parallel_layout=layout)
    assert mine[0] == [[0, 3, 0], [33, 35, 0]]
    assert [stage[1] for stage in mine[-2:]] == [[61, 61, 1], [61, 61, 0]]


def test_megatron_places_ends_elsewhere_than_written_so_those_layouts_are_refused(
    megatron: Oracle,
) -> None:
    written = {"pipeline_model_parallel_layout": "|EtL|"}
    assert megatron.chunks(1, 3, 1, **written) == [[[0, 0, 0]], [[0, 1, 0]], [[1, 1, 0]]]
    with pytest.raises(LayoutError, match="the first chunk must begin with E"):
        Pipeline.from_layout("|EtL|", 3)


def test_megatron_divides_by_zero_without_middle_stages_so_those_are_refused(
    megatron: Oracle,
) -> None:
    settings = {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 2}
    assert megatron.chunks(6, 2, 2, **settings) == "ZeroDivisionError"
    with pytest.raises(LayoutError, match="give one of them"):
        Pipeline.uneven(6, 2, 4, 2, vpp=2)


def test_final_norm_is_before_the_loss_and_with_mtp_behind_the_last_layer() -> None:
    def homes(layout: str) -> list[int]:
        pipeline = Pipeline.from_layout(layout, layout.count("|") + 1)
        return [p for p, _, chunk in pipeline if pipeline.has_final_norm(chunk)]

    assert homes("Et|t|L") == [2]
    assert homes("Et|t|mL") == [1]
    assert homes("Et|tmL") == [1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pipeline.even(7, 2), r"7 layers do not split .*pp=2; use .* divides 7, or an un"),
        (lambda: Pipeline.even(8, 2, 3), r"8 layers .*pp=2 x vpp=3"),
        (lambda: Pipeline.even(8, 4, loss_counts=True), r"8 layers and the loss .* divides 9"),
        (lambda: Pipeline.even(4, 1, 2), r"vpp=2 with pp=1: .*use a larger pp"),
        (lambda: Pipeline.even(0, 1), r"layers is 0; use 1 or more"),
        (lambda: Pipeline.even(1, 1, embedding_counts=True, loss_counts=True), None),
        (lambda: Pipeline.uneven(9, 3, first=2), r"7 layers left .*pp=2; change the layers in"),
        (lambda: Pipeline.uneven(9, 3, first=9), r"0 of 9 layers are left for 2 of 3 pipeline"),
        (lambda: Pipeline.uneven(9, 3, last=0), r"0 layers in the last pipeline stage"),
        (lambda: Pipeline.uneven(9, 3, 3, vpp=2), r"3 layers in the first .*use a multiple of 2"),
        (lambda: Pipeline.from_layout("Ett|tL|", 2), r"3 chunks; pp=2 must divide them"),
        (lambda: Pipeline.from_layout("Et((t)*2|)*2L", 3), r"'\(\(t\)\*2\|\)\*2L' cannot be read"),
        (lambda: Pipeline.from_layout("Et|tx|L", 3), r"'x\|L' cannot be read; write E, t, m, L"),
        (lambda: Pipeline.from_layout("Et|tL", 0), r"pp is 0; use 1 or more"),
        (lambda: Pipeline.from_layout("Et*99999999999|L", 2), r"more than 100000 symbols"),
        (lambda: Pipeline.from_layout("t*99999999999", 2), r"more than 100000 symbols"),
        (lambda: Pipeline.from_layout(f"Et*{'9' * 5000}|L", 2), r"more than 100000 symbols"),
        (lambda: Pipeline.from_layout("E(t*99999|)*99999999L", 2), r"more than 100000 symbols"),
        (lambda: Pipeline.from_layout("E" + "t" * 200_000 + "L", 1), r"more than 100000 symbols"),
        (lambda: Pipeline.from_layout("Et*\u0663|L", 2), r"'\*\u0663\|L' cannot be read"),
        (lambda: Pipeline.from_layout("Et|t", 2), r"L, the loss, is there 0 times"),
        (lambda: Pipeline.from_layout("EL", 1), r"no decoder layer"),
        (lambda: Pipeline.from_layout("Et|m|mL", 3), r"in several chunks; put all in one"),
        (lambda: Pipeline.from_layout("Et|m|tL", 3), r"put MTP layers last"),
        (lambda: Pipeline.from_layout("Et|m||L", 2), r"their stage's last chunk"),
        (lambda: Pipeline.from_layout("Et|t|tm|L", 2), r"in a later chunk of the first stage"),
    ],
)
def test_what_cannot_be_split_is_named(make: Callable[[], Pipeline], words: str | None) -> None:
    if words is None:
        assert make().num_layers == 1
        return
    with pytest.raises(LayoutError, match=words):
        make()
