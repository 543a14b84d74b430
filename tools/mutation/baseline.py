"""Which tests ran which lines, and how long they took. Knows nothing of mutants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import coverage

from tools.mutation.rules import statement_lines
from tools.mutation.runs import FEW_EXAMPLES, Copy, Watch

TEST_LIMIT_S = 300.0
LIMIT_S, LIMIT_TIMES = 20.0, 2.0  # a mutant's test may take this, and so many times its baseline


@dataclass(frozen=True, slots=True)
class Baseline:
    """Seconds of each test that passed, and for each path and line the tests that ran it.

    `early` are the paths and lines that also ran outside of a test, most of them at import. `cut`
    are the tests that ran with a few of their examples, with how many they have.
    """

    took_s: dict[str, float] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    ran: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    early: set[tuple[str, int]] = field(default_factory=set)

    def tests_of(self, path: str, line: int, seconds: float) -> list[str]:
        """The tests that ran the line, then the others of their files, each shortest first.

        The others because what one test has cached another may use. After `seconds`
        none is begun, but for the first.
        """
        ran = self.ran.get(path, {})
        lines = [line] if line in ran else statement_lines(Path(path).read_text("utf-8"), line)
        near = set().union(*(ran.get(each, ()) for each in lines))
        files = {test.split("::")[0] for test in near}
        others = {test for test in self.took_s if test.split("::")[0] in files} - near
        found = [*self._by_time(near), *self._by_time(others)]
        ends = accumulate(self.took_s[test] for test in found)
        return found[: max(1, sum(end <= seconds for end in ends))]

    def _by_time(self, tests: set[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self.took_s[test], test))

    def limit_s(self, test: str, whole: bool = False) -> float:
        """What a test may take on a mutant, with a few examples or with the `whole` number."""
        times = self.cut.get(test, FEW_EXAMPLES) / FEW_EXAMPLES if whole else 1.0
        return LIMIT_S + LIMIT_TIMES * times * self.took_s.get(test, LIMIT_S)

    def add(self, copy: Copy, file: str, scope: str, measured: Path) -> None:
        """Run the tests of `file` under coverage of the folder `scope`; keep it in `measured`.

        What is there already is not run again.
        """
        data = measured / file.replace("/", ".")
        data.mkdir(parents=True, exist_ok=True)
        passed = data / "passed.json"

        def work() -> int:
            settings = data / "settings"
            settings.write_text(
                f"[run]\ndata_file={data}/data\nparallel=True\npatch=subprocess,fork,_exit\n"
                f"context={file}\ninclude={copy.tree}/{scope}/*\n"
            )
            lines = coverage.Coverage(config_file=str(settings))
            watch = Watch(measured=lines, running=copy.running)
            lines.start()
            watch.run([file])
            lines.stop()
            lines.save()
            took_s = {t: s for t, s in watch.took_s.items() if t not in watch.failed}
            passed.write_text(json.dumps([took_s, watch.cut]))
            return 0

        if not passed.exists() and copy.run(work, lambda _: TEST_LIMIT_S) != 0:
            print(f"{file}: did not end, left out", flush=True)
            return
        took_s, cut = json.loads(passed.read_text())
        self.took_s.update(took_s)
        self.cut.update(cut)
        print(f"{file}: {len(took_s)} tests, {sum(took_s.values()):.1f} s", flush=True)
        for path, line, named in _lines_run(data, copy.tree.name):
            tests = set(took_s) if "" in named else named & set(took_s)
            self.ran.setdefault(path, {}).setdefault(line, set()).update(tests)
            if "" in named:
                self.early.add((path, line))


def _lines_run(data: Path, tree: str) -> Iterator[tuple[str, int, set[str]]]:
    """Path, line, and the tests that ran it; an empty name for imports and tests' own processes."""
    merged = coverage.Coverage(data_file=str(data / "data"))
    merged.combine([str(data)], keep=True)
    for path in merged.get_data().measured_files():
        for line, contexts in merged.get_data().contexts_by_lineno(path).items():
            yield path.partition(f"/{tree}/")[2], line, {c.partition("|")[2] for c in contexts}
