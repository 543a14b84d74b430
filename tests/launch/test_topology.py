import os
import stat
from pathlib import Path

import pytest

from megarl.config.schema import Config
from megarl.errors import ConfigError, LaunchError
from megarl.launch.topology import (
    expand_counts,
    launch_device,
    local_nodes,
    make_topology,
    place,
    place_critic,
    resolve,
    slurm_nodes,
)
from megarl.nodes import Node, Seat


def config(**groups: object) -> Config:
    return Config.model_validate({"actor": {"model": "m"}, **groups})


def nodes(count: int, cpus: int = 4, gpus: int = 0, hosts: int | None = None) -> list[Node]:
    hosts = hosts or count
    return [
        Node(f"n{i}", f"10.0.0.{i}", f"h{min(i, hosts)}", cpus, gpus) for i in range(1, count + 1)
    ]


def seats(setting: Config, where: list[Node], device: str) -> tuple[list[str], list[str]]:
    learner, servers = place(setting, where, "cuda" if device == "cuda" else "cpu")
    return [node.name for node in learner.nodes], [seat.nodes[0].name for seat in servers]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for scontrol on the PATH, for two nodes of one host."""
    program = tmp_path / "scontrol"
    program.write_text(
        "#!/bin/sh\n"
        'case "$2 $3" in\n'
        "'hostnames n[1-2]') printf 'n1\\nn2\\n' ;;\n"
        "node*) echo NodeName=$3 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=vm State=IDLE ;;\n"
        "*) echo 'invalid' >&2; exit 1 ;;\n"
        "esac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURMD_NODENAME": "n1",
}


def test_job_of_two_nodes_places_the_learner_on_one_and_the_server_on_the_other(
    scontrol: Path,
) -> None:
    topology = make_topology(config(learner={"parallel": {"tp": 2}}), JOB)
    assert topology.kind == "slurm"
    assert topology.device == "cpu"
    assert topology.describe() == "learner on n1, servers on n2"
    assert topology.servers[0].address == "127.0.0.1"


def test_job_with_gpus_is_a_cuda_run(scontrol: Path) -> None:
    found = slurm_nodes({**JOB, "SLURM_GPUS_ON_NODE": "2"})
    assert [node.num_gpus for node in found] == [2, 2]
    assert launch_device(config(), found) == "cuda"
    assert launch_device(config(launch={"device": "cpu"}), found) == "cpu"


def test_scontrols_refusal_is_a_launch_error_that_quotes_it(scontrol: Path) -> None:
    with pytest.raises(LaunchError, match=r"scontrol show hostnames x` failed: invalid"):
        slurm_nodes({**JOB, "SLURM_JOB_NODELIST": "x"})


def test_everything_is_on_this_machine_outside_a_job() -> None:
    topology = make_topology(config(rollout={"servers": 2}, launch={"device": "cpu"}), {})
    assert topology.kind == "local"
    assert {seat.address for seat in (topology.learner, *topology.servers)} == {"127.0.0.1"}


def test_node_takes_its_name_from_megarl_node() -> None:
    assert [node.name for node in local_nodes({"MEGARL_NODE": "a"})] == ["a"]


def test_this_machine_stands_for_several_nodes_where_megarl_node_names_them() -> None:
    setting = config(rollout={"servers": 2}, launch={"device": "cpu"})
    topology = make_topology(setting, {"MEGARL_NODE": "a,b", "CUDA_VISIBLE_DEVICES": ""})
    assert topology.describe() == "learner on a, servers on b, b"
    assert {seat.address for seat in (topology.learner, *topology.servers)} == {"127.0.0.1"}
    with pytest.raises(ConfigError, match="2 nodes, and this machine has 1 GPU"):
        local_nodes({"MEGARL_NODE": "a,b", "CUDA_VISIBLE_DEVICES": "0"})


def test_visible_gpus_are_those_of_cuda_visible_devices() -> None:
    assert local_nodes({"CUDA_VISIBLE_DEVICES": "3,5"})[0].num_gpus == 2
    assert local_nodes({"CUDA_VISIBLE_DEVICES": ""})[0].num_gpus == 0


def test_counts_of_nodes_are_expanded() -> None:
    assert expand_counts("8,4(x2)") == (8, 4, 4)
    with pytest.raises(LaunchError, match="four"):
        expand_counts("four")


def test_address_that_does_not_resolve_is_named() -> None:
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid"):
        resolve("no-such-host.invalid")


def test_servers_go_round_the_nodes_that_the_learner_leaves() -> None:
    three = config(rollout={"servers": 3})
    assert seats(three, nodes(3), "cpu") == (["n1"], ["n2", "n3", "n2"])
    assert seats(three, nodes(1), "cpu") == (["n1"], ["n1", "n1", "n1"])


def test_learner_spreads_over_cpu_nodes_by_need() -> None:
    eight = config(placement={"learner_gpus": 8})
    assert seats(eight, nodes(3), "cpu") == (["n1", "n2"], ["n3"])
    assert seats(eight, nodes(2), "cpu") == (["n1"], ["n2"])  # crowded: CPUs can be shared
    six = config(placement={"learner_gpus": 6})
    assert seats(six, nodes(5), "cpu") == (["n1", "n2"], ["n3"])
    five = config(placement={"learner_gpus": 5})
    assert seats(five, nodes(4), "cpu") == (["n1"], ["n2"])  # 5 ranks split over no 2 or 3 nodes


def test_roles_on_one_gpu_node_have_gpus_of_their_own() -> None:
    setting = config(learner={"parallel": {"tp": 4}}, rollout={"servers": 2, "parallel": {"tp": 2}})
    learner, servers = place(setting, nodes(1, gpus=8), "cuda")
    assert learner.gpus == (0, 4)
    assert [seat.gpus for seat in servers] == [(4, 6), (6, 8)]


def test_learner_fills_gpu_nodes_and_servers_take_the_others_first() -> None:
    setting = config(placement={"learner_gpus": 6}, rollout={"servers": 5})
    learner, servers = place(setting, nodes(3, gpus=4), "cuda")
    assert [node.name for node in learner.nodes] == ["n1", "n2"]
    assert learner.gpus == (0, 3)
    places = [(seat.nodes[0].name, seat.gpus) for seat in servers]
    assert places == [
        ("n3", (0, 1)),
        ("n3", (1, 2)),
        ("n3", (2, 3)),
        ("n3", (3, 4)),
        ("n1", (3, 4)),
    ]


@pytest.mark.parametrize(
    ("learner_gpus", "servers", "tp", "says"),
    [
        (9, 1, 1, "9 learner"),
        (7, 1, 1, "do not split evenly"),
        (4, 2, 8, "2 x 8 rollout GPUs"),
        (4, 5, 1, "room for 4 server"),
    ],
)
def test_what_does_not_fit_on_gpus_is_refused_with_the_arithmetic(
    learner_gpus: int, servers: int, tp: int, says: str
) -> None:
    setting = config(
        placement={"learner_gpus": learner_gpus},
        rollout={"servers": servers, "parallel": {"tp": tp}},
    )
    with pytest.raises(ConfigError, match=says):
        place(setting, nodes(2, gpus=4), "cuda")


def test_two_nodes_are_taken_by_default_and_refused_where_memory_must_be_shared(
    scontrol: Path,
) -> None:
    assert make_topology(config(), JOB).describe() == "learner on n1, servers on n2"
    with pytest.raises(ConfigError, match="n1, n2; ask Slurm for one node"):
        make_topology(config(weight_sync={"mode": "shared"}), JOB)


def colocated(learner_gpus: int, servers: int, tp: int = 1) -> Config:
    return config(
        placement={"mode": "colocated", "learner_gpus": learner_gpus},
        rollout={"servers": servers, "parallel": {"tp": tp}},
    )


def test_colocated_server_ranks_have_the_gpus_of_the_learners_ranks_in_order() -> None:
    learner, servers = place(colocated(8, 4, tp=2), nodes(2, gpus=4), "cuda")
    assert [node.name for node in learner.nodes] == ["n1", "n2"]
    assert learner.gpus == (0, 4)
    places = [(seat.nodes[0].name, seat.gpus) for seat in servers]
    assert places == [("n1", (0, 2)), ("n1", (2, 4)), ("n2", (0, 2)), ("n2", (2, 4))]


def test_colocated_roles_take_every_node_of_a_job_of_cpus() -> None:
    assert seats(colocated(8, 2, tp=4), nodes(2), "cpu") == (["n1", "n2"], ["n1", "n2"])
    assert seats(colocated(2, 1), nodes(1), "cpu") == (["n1"], ["n1"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("servers", "tp", "says"),
    [
        (1, 4, "leave n2 without one; raise rollout.servers to 2"),
        (1, 8, "8 do not fit beside the learner, which has 4 rank"),
        (3, 3, "a server is on one node, so there is room for 2"),
    ],
)
def test_colocated_servers_that_do_not_cover_the_learners_nodes_are_refused(
    device: str, servers: int, tp: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        seats(colocated(8, servers, tp), nodes(2, gpus=4), device)


APART = {"estimator": "gae"}


def test_critic_with_ranks_of_its_own_is_beside_the_learner_and_no_server_is_on_its_gpus() -> None:
    setting = config(
        advantage=APART,
        critic={"ranks": "own", "gpus": 2},
        rollout={"servers": 2},
        placement={"learner_gpus": 4},
    )
    (node,) = nodes(1, gpus=8)
    learner, servers = place(setting, [node], "cuda")
    critic = place_critic(setting, [node], "cuda", learner)
    assert critic == Seat((node,), (4, 6))
    assert [seat.gpus for seat in servers] == [(6, 7), (7, 8)]


def test_critic_that_does_not_fit_beside_the_learner_takes_the_next_node() -> None:
    setting = config(
        advantage=APART,
        critic={"ranks": "own", "gpus": 4},
        placement={"learner_gpus": 6},
        rollout={"servers": 3},
    )
    where = nodes(2, gpus=8)
    learner, servers = place(setting, where, "cuda")
    assert place_critic(setting, where, "cuda", learner) == Seat((where[1],), (0, 4))
    assert [(seat.nodes[0].name, seat.gpus) for seat in servers] == [
        ("n2", (4, 5)),
        ("n2", (5, 6)),
        ("n2", (6, 7)),
    ]
    with pytest.raises(ConfigError, match=r"critic\.ranks = own: its 4 rank\(s\) do not fit"):
        place(setting, where[:1], "cuda")


def test_critic_on_cpus_is_on_the_learner_s_node_inside_slurm_too(scontrol: Path) -> None:
    setting = config(advantage=APART, critic={"ranks": "own"}, launch={"device": "cpu"})
    topology = make_topology(setting, {"MEGARL_NODE": "a,b", "CUDA_VISIBLE_DEVICES": ""})
    assert topology.describe() == "learner on a, critic on a, servers on b"
    assert make_topology(setting, JOB).describe() == "learner on n1, critic on n1, servers on n2"
