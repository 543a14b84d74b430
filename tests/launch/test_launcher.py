import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.schema import Config
from megarl.errors import LaunchError
from megarl.launch.launcher import Launcher, learner_command
from megarl.launch.local import LocalSteps
from megarl.launch.slurm import SlurmSteps
from megarl.launch.topology import make_topology
from megarl.nodes import Node, Seat
from tests.launch.waiting import are_gone, read_pids

CONFIG = Config.model_validate({"actor": {"model": "m"}, "launch": {"device": "cpu"}})
FAMILY = str(Path(__file__).with_name("family.py"))


def launcher(run_dir: Path) -> Launcher:
    return Launcher(CONFIG, run_dir, make_topology(CONFIG, {}), LocalSteps(), ["r1"])


def test_learner_on_one_node_is_started_without_a_rendezvous(tmp_path: Path) -> None:
    argv = learner_command(CONFIG, tmp_path, Seat((Node("n", "127.0.0.1", "h", 1, 0),), None))
    assert argv == [
        sys.executable, "-m", "megarl.learner.agent",
        "--config", f"{tmp_path}/config.toml", "--run-dir", f"{tmp_path}",
    ]  # fmt: skip


def test_learner_on_two_nodes_meets_on_the_first(tmp_path: Path) -> None:
    two = tuple(Node(f"n{i}", "127.0.0.1", "h", 1, 0) for i in (1, 2))
    words = learner_command(CONFIG, tmp_path, Seat(two, None))[-6:]
    assert words[:5] == ["--nnodes", "2", "--node-rank", "{node_rank}", "--rdzv"]
    assert words[5].startswith("127.0.0.1:")


def test_slurm_step_has_one_task_on_each_node_of_its_seat() -> None:
    two = tuple(Node(f"n{i}", "127.0.0.1", "h", 1, 0) for i in (1, 2))
    command = SlurmSteps().command(Seat(two, None), "learner", ["true"])
    assert command[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--overlap"} <= set(command)
    assert command[-1] == "true"


async def test_environment_of_a_server_has_the_run_id_and_its_own_additions(
    tmp_path: Path,
) -> None:
    started = launcher(tmp_path)
    log = tmp_path / "log"
    argv = ["sh", "-c", "echo $MEGARL_RUN_ID $KEY $MEGARL_NODE"]
    process = await started.spawn(argv, {"KEY": "k"}, "server-0", log)
    assert await process.wait() == 0
    assert log.read_text() == f"r1 k {started.topology.nodes[0].name}\n"


async def test_learner_is_told_its_address_and_a_node_only_where_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several nodes each takes its own name, from Slurm."""
    monkeypatch.setenv("MEGARL_NODE", "ours")
    tell = ["sh", "-c", "echo $MEGARL_LEARNER_ADDRESS $MEGARL_NODE"]
    monkeypatch.setattr("megarl.launch.launcher.learner_command", lambda *_: tell)
    for count, told in ((1, "10.0.0.1 n0\n"), (2, "10.0.0.1\n")):
        nodes = tuple(Node(f"n{i}", f"10.0.0.{i + 1}", "h", 1, 0) for i in range(count))
        started = launcher(tmp_path)
        started.topology = replace(started.topology, learner=Seat(nodes, None))
        process = await started.start_learner()
        assert await process.wait() == 0
        assert process.log_path.read_text() == told
        process.log_path.unlink()


async def test_end_all_leaves_no_process_and_starts_none_after(tmp_path: Path) -> None:
    started = launcher(tmp_path)
    pids = tmp_path / "pids"
    argv = [sys.executable, FAMILY, str(pids)]
    process = await started.spawn(argv, {}, "server-0", tmp_path / "log")
    family = await asyncio.to_thread(read_pids, pids, 3)
    await asyncio.wait_for(started.end_all(), 5)
    assert process.returncode is not None
    assert are_gone(family)
    with pytest.raises(LaunchError, match="the run is ending"):
        await started.spawn(argv, {}, "server-0", tmp_path / "log")


async def test_kill_ends_a_server_with_all_below_it(tmp_path: Path) -> None:
    started = launcher(tmp_path)
    pids = tmp_path / "pids"
    argv = [sys.executable, FAMILY, str(pids)]
    process = await started.spawn(argv, {}, "server-0", tmp_path / "log")
    family = await asyncio.to_thread(read_pids, pids, 3)
    process.kill()
    await asyncio.wait_for(process.wait(), 3)
    assert are_gone(family)
