"""Weight sync under faults, each for real, in processes without engines: never a wrong token.

MEGARL_FAULT_SEED draws other faults, MEGARL_FAULT_RUNS another number of them. A run that goes
wrong is printed whole.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.weight_sync.bench import Bench, Outcome
from tests.weight_sync.scenarios import KINDS, SETTINGS, Scenario, scenarios

SEED = int(os.environ.get("MEGARL_FAULT_SEED", "20"))
RUNS = int(os.environ.get("MEGARL_FAULT_RUNS", "528"))
SAMPLE = 20  # runs of each bench in the default tests
BENCHES_AT_ONCE = 4


def hurt(setting: str, drawn: list[Scenario]) -> list[Outcome]:
    """Run what was drawn for one setting. Raises AssertionError naming all runs that go wrong."""
    bench, outcomes, wrong = Bench(setting), list[Outcome](), list[str]()
    try:
        for scenario in drawn:
            try:
                outcomes.append(bench.run(scenario))
            except AssertionError as error:
                wrong.append(f"MEGARL_FAULT_SEED={SEED} {scenario}: {error}")
                bench.close()
                bench = Bench(setting)
    finally:
        bench.close()
    assert not wrong, "\n".join(wrong)
    return outcomes


def hurt_all(drawn: dict[str, list[Scenario]]) -> list[Outcome]:
    """Several settings at the same time: most of it is waiting."""
    with ThreadPoolExecutor(BENCHES_AT_ONCE) as pool:
        found = [pool.submit(hurt, name, mine) for name, mine in drawn.items()]
    return [outcome for each in found for outcome in each.result()]


def table(outcomes: list[Outcome]) -> str:
    """Runs, refusals and the longest time of each kind of fault."""
    runs = Counter(outcome.scenario.kind for outcome in outcomes)
    refused = Counter(o.scenario.kind for o in outcomes if not o.is_verified)
    longest: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        longest[outcome.scenario.kind] = max(longest[outcome.scenario.kind], outcome.took_s)
    lines = [
        f"{kind:24} {runs[kind]:4} runs {refused[kind]:4} refused {longest[kind]:5.1f} s at most"
        for kind in sorted(runs)
    ]
    return "\n".join([*lines, f"{sum(runs.values())} runs, {sum(refused.values())} refused"])


@pytest.mark.parametrize("setting", ["one beside, one apart", "one learner rank beside"])
def test_no_fault_of_a_small_sample_makes_a_server_serve_what_nobody_proved(setting: str) -> None:
    quick = [s for s in scenarios(setting, 200, SEED) if not KINDS[s.kind].waits]
    hurt(setting, quick[:SAMPLE])


@pytest.mark.slow
def test_no_fault_of_hundreds_makes_a_server_serve_what_nobody_proved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    each = -(-RUNS // len(SETTINGS))
    outcomes = hurt_all({name: scenarios(name, each, SEED) for name in SETTINGS})
    with capsys.disabled():
        print(f"\nMEGARL_FAULT_SEED={SEED}\n{table(outcomes)}")
    assert len(outcomes) >= RUNS
    refused = {outcome.scenario.kind for outcome in outcomes if not outcome.is_verified}
    assert {name for name, kind in KINDS.items() if not kind.is_harmless} <= refused
