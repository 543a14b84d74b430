"""Runs of pytest in a copy of the working tree, each a fork that has heavy libraries imported.

Owns the copy, what keeps the engines out of it, and time limits. Knows nothing of mutants.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import coverage
import hypothesis
import psutil
import pytest

POLL_S = 0.05
FEW_EXAMPLES = 25
PR_SET_PDEATHSIG = 1  # linux/prctl.h: a fork ends with the process that made it
ENGINES = ("sglang", "megatron")
PRELOADED = (
    "aiohttp hypothesis.extra.numpy hypothesis.strategies numpy pydantic.main safetensors.numpy"
    " torch torch.distributed"
).split()


@dataclass(eq=False)
class Watch:
    """A pytest plugin: runs the tests in `order`, all where it is None; keeps what they did.

    `instead` gets the collected tests by name, and none is run. `running` is a file that gets the
    name of the test that runs. A test of hypothesis gets `examples` at most, or its own number
    where that is None; `cut` are those that would have had more, with how many.
    """

    order: Sequence[str] | None = None
    instead: Callable[[dict[str, pytest.Item]], None] | None = None
    measured: coverage.Coverage | None = None
    running: Path | None = None
    examples: int | None = FEW_EXAMPLES
    took_s: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put `order` in the place of what was collected."""
        if self.order is not None:
            by_id = {item.nodeid: item for item in items}
            items[:] = [by_id[each] for each in self.order if each in by_id]

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Hand the tests to `instead`."""
        if self.instead is None:
            return None
        self.instead({item.nodeid: item for item in session.items})
        return True

    def run_items(self, items: dict[str, pytest.Item], order: Sequence[str]) -> int:
        """Run collected tests until one fails: 1 where one did."""
        for name, after in zip_longest(order, order[1:]):
            item = items[name]
            following = items[after] if after else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return 1
        return 0

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the test that runs, for coverage too, and bound its examples."""
        if self.measured is not None:
            self.measured.switch_context(item.nodeid)
        if self.running is not None:
            self.running.write_text(item.nodeid)
        test = getattr(item, "obj", None)
        if self.examples is not None and hypothesis.is_hypothesis_test(test):
            own = test._hypothesis_internal_use_settings  # as hypothesis' own plugin does
            if own.max_examples > self.examples:
                self.cut[item.nodeid] = own.max_examples
                test._hypothesis_internal_use_settings = hypothesis.settings(
                    own, max_examples=self.examples
                )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's time and whether it did not pass."""
        self.took_s[report.nodeid] = self.took_s.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.append(report.nodeid)

    def run(self, files: Sequence[str], *options: str) -> int:
        """Pytest's exit status on these files; hypothesis tries the same examples each time."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "mutation", derandomize=True, database=None, deadline=None, phases=phases
        )
        hypothesis.settings.load_profile("mutation")
        return int(pytest.main([*files, *options, "-q", "-p", "no:cacheprovider"], [self]))


@dataclass(frozen=True, slots=True)
class Copy:
    """The working tree in `folder`/tree; in it modules that keep the engines out."""

    folder: Path

    @property
    def tree(self) -> Path:
        """Where the sources are."""
        return self.folder / "tree"

    @property
    def running(self) -> Path:
        """The file with the name of the test that runs."""
        return self.folder / "running"

    def make(self, root: Path) -> None:
        """Copy what git knows, what is new, and compiled libraries."""
        listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.check_output(listed, cwd=root, text=True).split("\0")
        compiled = [str(path.relative_to(root)) for path in root.glob("megarl/**/*.so")]
        for name in [*filter(None, names), *compiled]:
            if (root / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.tree / name)
        for engine in ENGINES:  # in the tree: tests give it to processes as their one path
            (self.tree / f"{engine}.py").write_text("raise ImportError(__name__)\n")
        # The hash of a source decides about its byte code: a mutant may have equal size and age.
        how = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "megarl"]
        subprocess.run([sys.executable, *how], cwd=self.tree, check=True)

    def warm(self) -> None:
        """Import what most runs import, and pytest's plugins, once for all forks."""
        for name in PRELOADED:
            importlib.import_module(name)
        (self.folder / "empty").mkdir()
        pytest.main(["-qq", f"--rootdir={self.folder}/empty", f"{self.folder}/empty"])
        gc.freeze()

    def run(self, work: Callable[[], int], limit_s: Callable[[str], float]) -> int | None:
        """What `work` returns, in a fork inside the copy; None where a test took over its limit.

        `limit_s` is asked with what `running` holds, which is "" before the first test. Counted
        are seconds of CPU and of sleep, not those in which the machine ran something else.
        """
        self.running.write_text("")
        child = os.fork()
        if child == 0:
            code = 70
            try:
                self._enter()
                code = work()
            finally:
                os._exit(code)
        code, test, slept_s, used_s, before_s = None, "", 0.0, 0.0, 0.0
        while code is None and slept_s + used_s - before_s < limit_s(test):
            time.sleep(POLL_S)
            used_s, sleeps = _usage(child)
            slept_s += POLL_S if sleeps else 0.0
            if (now := self.running.read_text()) != test:
                test, slept_s, before_s = now, 0.0, used_s
            done, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it left running
        if code is None:
            os.waitpid(child, 0)
        return code

    def _enter(self) -> None:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(self.folder / f"log{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.tree)
        sys.path.insert(0, str(self.tree))
        os.environ.update(
            PYTHONPATH=str(self.tree),
            PYTHONDONTWRITEBYTECODE="1",
            PYTEST_DEBUG_TEMPROOT=str(self.folder),
            MEGARL_PROPERTY_SEED="1",
        )


def _usage(child: int) -> tuple[float, bool]:
    """Seconds of CPU of a process and its living descendants, and whether all of them sleep."""
    used_s, sleeps = 0.0, True
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(child)
        for each in [first, *first.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used_s += sum(each.cpu_times()[:2])
                sleeps &= each.status() == psutil.STATUS_SLEEPING
    return used_s, sleeps
