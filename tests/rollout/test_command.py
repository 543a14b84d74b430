"""The command of a server: what the config says, on a CPU and on GPUs, keys out of sight."""

from __future__ import annotations

import argparse
import json

import aiohttp

from megarl.compat import sglang_server
from megarl.rollout import command
from megarl.rollout.command import Device, ServerCommand, ServerPlace, server_command
from tests.rollout.running import make_config

PLACE = ServerPlace(1, 2, "127.0.0.1", 30100, "open-sesame", "root-sesame")


def made(device: Device, **groups: object) -> ServerCommand:
    return server_command(make_config("/models/m", **groups), PLACE, device)


def value(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_keys_travel_in_the_environment_only() -> None:
    made_command = made("cuda")
    assert not [word for word in made_command.argv if "sesame" in word]
    assert "sesame" not in repr(made_command) + repr(PLACE)
    flags = sglang_server.take_keys(dict(made_command.env))
    assert " ".join(flags) == "--api-key=open-sesame --admin-api-key=root-sesame"


async def test_idle_connections_are_closed_by_the_client_and_not_under_a_request() -> None:
    connector = aiohttp.TCPConnector(limit=0)  # as the client makes its own
    for device in ("cpu", "cuda"):
        kept_s = int(made(device).env["SGLANG_TIMEOUT_KEEP_ALIVE"])  # type: ignore[arg-type]
        assert kept_s > 2 * connector._keepalive_timeout
    await connector.close()


def test_server_is_started_as_the_module_that_prepares_it() -> None:
    assert sglang_server.__name__ == command.MODULE


def test_cpu_server_gets_the_cpu_flags_and_a_gpu_server_none_of_them() -> None:
    cpu, gpu = made("cpu"), made("cuda")
    assert value(cpu.argv, "--attention-backend") == "torch_native"
    assert "--sleep-on-idle" in cpu.argv
    assert cpu.env["OMP_NUM_THREADS"] == "1"
    assert not {"--attention-backend", "--sleep-on-idle"} & set(gpu.argv)
    assert not {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"} & set(gpu.env)
    assert value(gpu.argv, "--device") == "cuda"
    assert value(gpu.argv, "--custom-weight-loader") == "megarl.weight_sync.receiver.load"


def test_memory_saver_is_for_colocated_servers_on_gpus() -> None:
    shared = {"mode": "colocated"}
    assert "--enable-memory-saver" in made("cuda", placement=shared).argv
    assert made("cuda", placement=shared).env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    for other in (made("cpu", placement=shared), made("cuda")):
        assert "--enable-memory-saver" not in other.argv
        assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in other.env


def test_ranks_are_bound_to_cores_only_on_a_cpu_with_several_of_them() -> None:
    variable = "SGLANG_CPU_OMP_THREADS_BIND"
    two = {"parallel": {"tp": 2}}
    assert made("cpu", rollout=two).env[variable].count("|") == 1
    assert variable not in made("cpu").env
    assert variable not in made("cuda", rollout=two).env


def test_experts_and_attention_are_divided_as_the_settings_say() -> None:
    parallel = {"tp": 4, "ep": 2, "attention_dp": 4}
    argv = made("cuda", rollout={"parallel": parallel}).argv
    assert (value(argv, "--ep-size"), value(argv, "--attn-dp-size")) == ("2", "4")
    assert not {"--ep-size", "--attn-dp-size"} & set(made("cuda").argv)


def test_server_that_keeps_old_keys_and_values_shares_and_overlaps_nothing() -> None:
    switches = {"--disable-radix-cache", "--disable-overlap-schedule"}
    assert switches <= set(made("cuda", weight_sync={"pause": "in_place"}).argv)
    assert not switches & set(made("cuda").argv)


def test_users_arguments_come_last_so_that_they_win() -> None:
    argv = made("cpu", rollout={"engine_args": {"log_level": "info"}}).argv
    assert argv[-2:] == ("--log-level", "info")


def test_kv_cache_of_zero_tokens_is_left_to_the_engine() -> None:
    assert "--max-total-tokens" not in made("cuda", rollout={"max_total_tokens": 0}).argv


def test_servers_and_their_restarts_sample_with_different_seeds() -> None:
    config = make_config()
    places = [ServerPlace(i, n, "h", 1, "k", "a") for i in range(3) for n in range(3)]
    seeds = {value(server_command(config, p, "cpu").argv, "--random-seed") for p in places}
    assert len(seeds) == len(places)


def test_key_that_begins_with_a_dash_is_read_as_a_key() -> None:
    flags = sglang_server.take_keys(
        {"MEGARL_ROLLOUT_API_KEY": "-dash", "MEGARL_ROLLOUT_ADMIN_KEY": "--dash"}
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    parser.add_argument("--admin-api-key")
    assert vars(parser.parse_args(flags)) == {"api_key": "-dash", "admin_api_key": "--dash"}


def test_server_of_float8_starts_without_weights_and_is_told_of_its_blocks() -> None:
    fp8 = {"precision": {"weights": "fp8"}}
    for device in ("cpu", "cuda"):
        argv = made(device, rollout=fp8).argv  # type: ignore[arg-type]
        assert value(argv, "--load-format") == "dummy"
        assert value(argv, "--dtype") == "bfloat16"  # the learner's is fp32 here
        overrides = json.loads(value(argv, "--json-model-override-args"))
        assert overrides["quantization_config"]["weight_block_size"] == [128, 128]
    assert not {"--load-format", "--json-model-override-args"} & set(made("cpu").argv)
