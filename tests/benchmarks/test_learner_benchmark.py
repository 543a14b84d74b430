"""What the benchmark of the learner makes of its figures, and what its parts measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import lengths, packing
from benchmarks.training.measure import peaks
from benchmarks.training.report import FLOOR, LIMITS, summary, table
from megarl.actor.flops import SequenceFlops
from megarl.buffer.schedule import ScheduleShape, make_schedule

KEYS = ("step_over_bare_megatron", "packing_efficiency", "dp_imbalance", "logprob_peak_ratio")


def measured() -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Figures that are easy to reckon with."""
    seconds = {
        "megarl": [1.0, 3.0, 2.0],
        "bare": [2.0, 2.0, 2.0],
        "megarl_everywhere": [2.0, 3.0, 2.0],
        "padded": [4.0, 4.0, 8.0],
    }
    norms = {"megarl": 2.0, "bare": 2.0001}
    steps = {"seconds": seconds, "grad_norms": norms, "tokens": 100, "longest": 40}
    row = packing.Packed(8, 2, 64, False, 2, 0.99, 0.01, 0.9, 0.1, 0.4)
    worse = packing.Packed(8, 2, 64, True, 2, 0.98, 0.005, 0.9, 0.1, 0.4)
    sums = {"logp": -5.0, "entropy": 3.0, "grad": 1.0}
    memory = {"naive": {"peak_bytes": 1000, **sums}, "megarl": {"peak_bytes": 250, **sums}}
    rows = [
        {name: getattr(each, name) for name in each.__dataclass_fields__} for each in (row, worse)
    ]
    return steps, rows, memory


def test_ratios_are_medians_of_turns_and_the_worst_row_counts() -> None:
    result = summary(*measured())
    assert {key: result[key] for key in KEYS} == {
        "step_over_bare_megatron": 1.0,
        "packing_efficiency": 0.98,
        "dp_imbalance": 0.01,
        "logprob_peak_ratio": 0.25,
    }
    assert result["step_over_padded"] == 0.25
    assert result["everywhere_over_bare_megatron"] == 1.0
    json.dumps(result)
    text = table(result)
    assert text.count("target") == len(LIMITS) + len(FLOOR)
    assert "naive 0, megarl 0" in text


def test_figures_of_another_gradient_or_other_logprobs_are_refused() -> None:
    steps, rows, memory = measured()
    with pytest.raises(AssertionError, match="gradients differ"):
        summary({**steps, "grad_norms": {"megarl": 1.0, "bare": 1.1}}, rows, memory)
    wrong = {**memory["megarl"], "entropy": 3.1}
    with pytest.raises(AssertionError, match="entropy differs"):
        summary(steps, rows, {**memory, "megarl": wrong})


def test_packing_in_order_has_every_sample_once_within_the_budget() -> None:
    refs = lengths.references(lengths.draw(256, seed=1))
    shape = ScheduleShape(4, 1024, SequenceFlops(1.0, 1.0, 1.0))
    for plan in (packing.in_order(refs, shape), make_schedule(refs, shape)):
        placed = [ref.sample_id for rank in plan.schedule for each in rank for ref in each]
        assert sorted(placed) == [ref.sample_id for ref in refs]
        assert plan.microbatch_tokens <= 1024
        assert len({len(rank) for rank in plan.schedule}) == 1


def test_lengths_of_a_file_are_its_questions_and_spread_around_its_answers(tmp_path: Path) -> None:
    row = {"question": "How many are 12 and 3?", "answer": "12+3 = 15\n#### 15"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    drawn = lengths.draw(800, seed=0, file=tmp_path / "rows.jsonl")
    assert {prompt for prompt, _ in drawn} == {8}  # how many are 1 2 and 3 ?
    responses = sorted(response for _, response in drawn)
    assert responses[0] < 13 < responses[-1]
    assert 10 <= responses[400] <= 14  # 1 2 + 3 = 1 5 # # # # 1 5, cut to whole tokens


@pytest.mark.slow
def test_peaks_of_both_ways_are_measured_on_the_same_numbers() -> None:
    found = peaks(num_tokens=64, vocabulary=4096)
    for key in ("logp", "entropy", "grad"):
        assert found["megarl"][key] == pytest.approx(found["naive"][key], rel=1e-4)
    assert all(way["peak_bytes"] > 0 for way in found.values())
