"""What tests make of each mutant. Knows nothing of where mutants and timings come from.

Most mutants are swapped into a process that has imported and collected all tests. One that stands
outside of functions, or whose line runs at import too, gets a process that imports anew.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest

from tools.mutation.baseline import Baseline
from tools.mutation.runs import FEW_EXAMPLES, Copy, Watch
from tools.mutation.sites import Mutant
from tools.mutation.swap import functions_of, swap

SURVIVED, KILLED, TIMED_OUT, UNCOVERED = "survived", "killed", "timed out", "not covered"
NOT_SWAPPED = 71  # an exit status that pytest has no use for

Run = Callable[[Mutant, str, str, list[str], int | None], int]
"""Exit status of tests: a mutant, its file's text without and with it, tests, examples at most."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of mutant `number` of a draw; `by` is the first test that failed."""

    number: int
    at: str
    operator: str
    change: list[str]
    outcome: str
    by: str

    def tell(self, out: str) -> None:
        """One line, and the change where no test noticed it; as JSON into `out`, if any."""
        print(f"{self.number:4} {self.outcome:11} {self.at} {self.operator} {self.by}", flush=True)
        if self.outcome in (SURVIVED, UNCOVERED):
            print(*(f"     {line}" for line in self.change), sep="\n", flush=True)
        if out:
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True, slots=True)
class Trials:
    """Runs of a copy's tests over mutants of its files. `out` is Trial.tell's.

    A mutant gets `seconds` of tests at most, by the baseline's clock, and where that is not all
    there are, few examples only.
    """

    copy: Copy
    baseline: Baseline
    seconds: float
    out: str

    def run(self, sample: dict[int, Mutant]) -> list[str]:
        """The outcomes of the mutants, in no order; each is told when it is known.

        Raises RuntimeError where the tests fail without any mutant.
        """
        used = set().union(*map(self._tests, sample.values()))
        files = sorted({test.split("::")[0] for test in used})
        told, results = os.dup(1), self.copy.folder / "results"

        def swapped(items: dict[str, pytest.Item]) -> None:
            os.dup2(told, 1)
            tests = [test for test in self.baseline.took_s if test in used]
            work = partial(self._collected, host, items, tests)
            if self.copy.run(work, self.baseline.limit_s) != 0:
                return
            functions = functions_of(f"{self.copy.tree}/")

            def one(
                mutant: Mutant, source: str, changed: str, tests: list[str], most: int | None
            ) -> int:
                early = (mutant.path, mutant.start[0]) in self.baseline.early
                path = str(self.copy.tree / mutant.path)
                if early or not (changed == source or swap(functions, path, source, changed)):
                    return NOT_SWAPPED
                host.examples = most
                return self._collected(host, items, tests)

            outcomes = {number: self._try(number, sample[number], one) for number in sample}
            results.write_text(json.dumps(outcomes))

        host = Watch(instead=swapped, running=self.copy.running)
        self.copy.run(lambda: host.run(files, "-s"), lambda _: float("inf"))
        if not results.exists():
            raise RuntimeError(f"tests fail without any mutant: {self._by().read_text()}")
        outcomes = {int(n): outcome for n, outcome in json.loads(results.read_text()).items()}
        late = [number for number, outcome in outcomes.items() if outcome is None]
        return [
            *filter(None, outcomes.values()),
            *(self._try(number, sample[number], self._imported) or "" for number in late),
        ]

    def _try(self, number: int, mutant: Mutant, run: Run) -> str | None:
        """The outcome of `run` in a fork, which is told; None where nothing could be swapped.

        A test that fails in this order without the mutant too says nothing, and is left out.
        """
        source = (self.copy.tree / mutant.path).read_text(encoding="utf-8")
        changed = mutant.apply(source)
        assert changed is not None
        tests = self._tests(mutant)
        more = [test for test in tests if test in self.baseline.cut and self.seconds == math.inf]
        outcome, by = SURVIVED if tests else UNCOVERED, ""
        for names, most in ((tests, FEW_EXAMPLES), (more, None)):
            while outcome == SURVIVED and names:
                code, test = self._run(run, mutant, changed, names, most)
                if code == NOT_SWAPPED:
                    return None
                if code == 0:
                    break
                tried = names[: names.index(test) + 1] if test in names else names
                if self._run(run, mutant, source, tried, most)[0] == 0:
                    outcome = TIMED_OUT if code is None else KILLED
                    by = test or f"exit status {code}"
                elif test in names:
                    names.remove(test)
                else:
                    break
        lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
        at = f"{mutant.path}:{mutant.start[0]}"
        Trial(number, at, mutant.operator, list(lines)[3:], outcome, by).tell(self.out)
        return outcome

    def _run(
        self, run: Run, mutant: Mutant, text: str, tests: list[str], most: int | None
    ) -> tuple[int | None, str]:
        """Exit status of the tests with `text` in the mutant's file, and the test that failed."""
        file = self.copy.tree / mutant.path
        source = file.read_text(encoding="utf-8")
        self._by().write_text("")
        file.write_text(text, encoding="utf-8")  # for the processes that tests start
        work = partial(run, mutant, source, text, tests, most)
        code = self.copy.run(work, partial(self.baseline.limit_s, whole=most is None))
        file.write_text(source, encoding="utf-8")
        return code, (self.copy.running if code is None else self._by()).read_text()

    def _tests(self, mutant: Mutant) -> list[str]:
        return self.baseline.tests_of(mutant.path, mutant.start[0], self.seconds)

    def _collected(self, host: Watch, items: dict[str, pytest.Item], tests: list[str]) -> int:
        code = host.run_items(items, tests)
        self._by().write_text("".join(host.failed[:1]))
        return code

    def _imported(
        self, mutant: Mutant, source: str, changed: str, tests: list[str], most: int | None
    ) -> int:
        watch = Watch(order=tests, running=self.copy.running, examples=most)
        code = watch.run(list(dict.fromkeys(test.split("::")[0] for test in tests)), "-x")
        self._by().write_text("".join(watch.failed[:1]))
        return code

    def _by(self) -> Path:
        return self.copy.folder / "by"
