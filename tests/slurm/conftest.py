"""A real Slurm of two pretended nodes on this machine, for the session. Skips, with the reason,
where there can be none.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
INSTALL = "apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge"


@dataclass(frozen=True)
class Cluster:
    """Runs Slurm's commands against the cluster."""

    folder: Path

    def run(self, *argv: str, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        return subprocess.run(
            argv, capture_output=True, text=True, env=environ, timeout=limit_s, cwd=REPOSITORY
        )

    def submit(self, *argv: str) -> str:
        """The id of a job that was submitted."""
        done = self.run("sbatch", "--parsable", *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """What squeue lists, running or waiting."""
        return self.run("squeue", "-h", "-o", "%A").stdout.split()

    def cancel_all(self) -> None:
        """End what a failed test left."""
        if jobs := self.jobs():
            self.run("scancel", *jobs)

    def exit_code(self, job: str) -> str:
        """STATUS:SIGNAL of a job that has ended."""
        text = self.run("scontrol", "show", "job", job).stdout
        return next(word[9:] for word in text.split() if word.startswith("ExitCode="))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root; run `make test-slurm` as root, as in a container")
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        _install()
    folder = tmp_path_factory.mktemp("slurm")
    up = subprocess.run([HERE / "up.sh", folder], capture_output=True, text=True, timeout=60)
    try:
        assert up.returncode == 0, up.stderr
        yield Cluster(folder)
    finally:
        subprocess.run([HERE / "down.sh", folder], check=True, timeout=60)


def _install() -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("Slurm is not installed, and this system has no apt-get to install it with")
    done = subprocess.run(
        ["sh", "-c", INSTALL],
        capture_output=True,
        text=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
    if done.returncode != 0:
        pytest.skip(f"Slurm cannot be installed here (`{INSTALL}`): {done.stderr.strip()[-300:]}")
