"""Combinations of settings, the model's folder, the files and this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from megarl.config.check import check_settings
from megarl.config.check_machine import check_machine, launch_kind


def test_configuration_that_can_run_has_no_violations(place) -> None:
    place.load()


def test_missing_model_folder_is_named(place) -> None:
    folder = place.folder / "nowhere"
    text = place.violation("--actor.model", str(folder))
    assert text.startswith(f"model folder {folder} does not exist")


def test_model_of_another_architecture_is_refused(place) -> None:
    config = json.loads((place.model / "config.json").read_text())
    config["architectures"] = ["OPTForCausalLM"]
    (place.model / "config.json").write_text(json.dumps(config))
    assert "architecture OPTForCausalLM is not supported" in place.violation()


def test_truncated_weights_are_named(place) -> None:
    path = place.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "model.safetensors" in place.violation()


def test_missing_tokenizer_is_named(place) -> None:
    (place.model / "tokenizer.json").unlink()
    assert place.violation().startswith(f"{place.model} has no tokenizer.json")


def test_model_without_a_chat_template_is_refused_where_one_is_needed(place) -> None:
    assert "has no chat template" in place.violation("--prompts.template", "chat")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
    ],
)
def test_chat_template_is_found_in_both_of_its_places(place, file: str, text: str) -> None:
    (place.model / file).write_text(text)
    place.load("--prompts.template", "chat", "--prompts.system", "Be brief.")


def test_broken_tokenizer_config_is_named(place) -> None:
    (place.model / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json is no JSON object" in place.violation(
        "--prompts.template", "chat"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--learner.optimizer_steps_per_rollout 3",
            "16 x 16 = 256 samples do not split into learner.optimizer_steps_per_rollout = 3",
        ),
        (
            "--placement.learner_gpus 3 --learner.parallel.tp 2",
            "placement.learner_gpus = 3 is no multiple of learner.parallel.tp x "
            "learner.parallel.pp = 2 x 1 = 2; use 4",
        ),
        ("--rollout.samples_per_prompt 1", "every advantage is 0"),
        ("--launch.time_limit_s 300", "launch.time_limit_s = 300 with checkpoint.before_end_s"),
        ("--rollout.max_inflight_samples 8", "rollout.max_inflight_samples = 8 is below"),
        (
            "--rollout.sampling.max_new_tokens 60",
            "16 + 60 = 76 tokens exceed the model's max_position_embeddings = 64",
        ),
        (
            "--learner.max_tokens_per_microbatch 31",
            "16 + 16 = 32 tokens exceed learner.max_tokens_per_microbatch = 31",
        ),
        (
            "--rollout.max_total_tokens 31",
            "16 + 16 = 32 tokens exceed rollout.max_total_tokens = 31",
        ),
        (
            "--weight_sync.probe_tokens 64",
            "weight_sync.probe_tokens = 64 and the 8 tokens before them exceed the model's",
        ),
        (
            "--weight_sync.probe_tokens 32 --learner.max_tokens_per_microbatch 32",
            "weight_sync.probe_tokens = 32 and the 8 tokens before them exceed "
            "learner.max_tokens_per_microbatch = 32",
        ),
        (
            "--learner.optimizer.min_lr 1e-7",
            "learner.optimizer.min_lr = 1e-07 has no meaning with learner.optimizer.schedule = "
            "constant",
        ),
        (
            "--learner.optimizer.decay_steps 9",
            "learner.optimizer.decay_steps = 9 has no meaning with learner.optimizer.schedule",
        ),
        (
            "--learner.optimizer.schedule cosine --learner.optimizer.min_lr 1",
            "learner.optimizer.min_lr = 1.0 is above learner.optimizer.lr = 1e-06",
        ),
        (
            "--learner.optimizer.schedule linear --learner.optimizer.decay_steps 5 "
            "--learner.optimizer.warmup_steps 5",
            "schedule = linear ends at optimizer step 5 when learner.optimizer.warmup_steps = 5",
        ),
        (
            "--learner.optimizer.schedule cosine --loop.versions 5 "
            "--learner.optimizer.warmup_steps 5",
            "ends at optimizer step 5, the whole run, when learner.optimizer.warmup_steps = 5",
        ),
        ("--prompts.path /no/such.jsonl", "prompts.path: /no/such.jsonl does not exist"),
        ("--prompts.path /", "prompts.path: / is a folder"),
        ("--prompts.path=", "prompts.path is not set; prompts.format = jsonl needs it"),
        ("--prompts.task gcd", "prompts.task = 'gcd' has no meaning with prompts.format = jsonl"),
        ("--prompts.task_args.a 1", "prompts.task_args = {'a': 1} has no meaning"),
        ("--prompts.system hello", "has no meaning with prompts.template = none"),
        ("--eval.prompts /no/such.jsonl", "eval.prompts: /no/such.jsonl does not exist"),
        ("--eval.every 5", "eval.every = 5 without eval.prompts evaluates nothing"),
        ("--reward.kind function", "needs reward.function as path/to/file.py:name; found ''"),
        ("--reward.kind function --reward.function f.py", "path/to/file.py:name; found 'f.py'"),
        ("--reward.kind function --reward.function /no.py:f", "reward.function: /no.py does not"),
        ("--reward.function /no.py:f", "has no meaning with reward.kind = exact"),
        ("--reward.kind reasoning_gym", "scores only what prompts.format = reasoning_gym"),
        ("--run.name a/b", "run.name = 'a/b' is no name of a folder"),
        ("--launch.kind slurm", "launch.kind = slurm outside a Slurm job"),
        (
            "--launch.rollout_python /no/python",
            "launch.rollout_python = '/no/python' is no program",
        ),
        ("--launch.rollout_port 65535 --rollout.servers 2", "reaches port 65536, above 65535"),
        (
            "--launch.rollout_port 20400 --launch.learner_port 20401 --rollout.servers 2",
            "launch.learner_port = 20401 is one of the servers' ports 20400 to 20401",
        ),
        (
            "--launch.time_limit_s 9 --checkpoint.before_end_s 0",
            "before_end_s = 0: 0 does not watch the time",
        ),
    ],
)
def test_combination_that_cannot_run_is_refused(place, arguments: str, text: str) -> None:
    assert text in place.violation(*arguments.split())


def test_samples_over_a_microbatch_are_allowed_where_they_are_cut_or_left_out(place) -> None:
    for policy in ("truncate", "filter"):
        place.load(
            *("--learner.max_tokens_per_microbatch", "31", "--weight_sync.probe_tokens", "8"),
            *("--learner.overlong_samples", policy),
        )


def test_schedule_that_falls_ends_with_the_run_unless_a_step_is_given(place) -> None:
    arguments = ["--learner.optimizer.schedule=cosine", "--loop.versions=6"]
    arguments += ["--learner.optimizer_steps_per_rollout=2", "--learner.epochs_per_rollout=3"]
    assert place.load(*arguments).decay_steps == 36
    assert place.load(*arguments, "--learner.optimizer.decay_steps=7").decay_steps == 7


def test_generated_prompts_need_a_task_and_no_file(place) -> None:
    found = place.violations("--prompts.format", "reasoning_gym")
    assert ["needs prompts.task" in text or "prompts.path" in text for text in found] == [True] * 2


def test_settings_are_judged_without_reading_a_model(place) -> None:
    config = place.load()
    assert check_settings(config) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--learner.parallel.tp 3",
            "learner.parallel.tp = 3: 4 attention heads, 64 rows of the gate (intermediate_size), "
            "2 kv heads and 64 rows of the fused qkv do not split over 3 ranks; use 1, 2 or 4",
        ),
        (
            "--learner.parallel.pp 3",
            "learner.parallel.pp = 3: 4 layers do not split into 3 equal stages; use 1, 2 or 4",
        ),
        (
            "--rollout.parallel.tp 4 --launch.device cpu",
            "rollout.parallel.tp = 4: on a CPU SGLang pads 2 kv heads to a multiple of 4 and 64 "
            "columns of down_proj to a multiple of 32 x 4 = 128, to shapes that the checkpoint "
            "does not have; use 1 or 2",
        ),
        (
            "--rollout.parallel.tp 3 --launch.device cuda",
            "rollout.parallel.tp, ep, attention_dp: 4 attention heads do not split over "
            "rollout.parallel.tp=3; use rollout.parallel.tp from 1, 2, 4",
        ),
    ],
)
def test_parallel_size_that_does_not_divide_names_the_sizes_that_do(
    place, arguments: str, text: str
) -> None:
    assert place.violation(*arguments.split()) == text


def test_learner_tp_may_exceed_the_kv_heads_by_a_multiple(place) -> None:
    place.load("--learner.parallel.tp", "4")


def test_rollout_tp_may_exceed_the_kv_heads_on_gpus_only(place) -> None:
    place.load("--rollout.parallel.tp", "4", "--launch.device", "cuda")
    assert "pads 2 kv heads" in place.violation(
        "--rollout.parallel.tp", "4", "--launch.device", "cpu"
    )


def test_no_rollout_tp_is_named_where_none_works(place) -> None:
    place.change_model(intermediate_size=40)
    assert place.violation("--launch.device", "cpu").endswith("no tp works for this model")


def test_fixed_port_that_is_taken_is_named(place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = place.violation("--launch.learner_port", str(port))
    assert text.startswith(f"launch.learner_port: port {port} is taken on this host")


def test_run_is_slurms_inside_a_job_unless_it_is_told_otherwise(place) -> None:
    job = {"SLURM_JOB_ID": "1"}
    assert (launch_kind(place.load(), {}), launch_kind(place.load(), job)) == ("local", "slurm")
    assert launch_kind(place.load("--launch.kind", "local"), job) == "local"


def test_ports_of_other_hosts_are_not_probed_inside_a_slurm_job(place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = place.load()
        launch = free.launch.model_copy(update={"learner_port": taken.getsockname()[1]})
        config = free.model_copy(update={"launch": launch})
        assert check_machine(config, {"SLURM_JOB_ID": "1"}) == []


def test_checking_imports_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, megarl.cli, megarl.config.record; "
        "print([m for m in ('torch', 'megatron', 'sglang', 'transformers') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_time_limit_that_leaves_time_is_taken(place) -> None:
    place.load("--launch.time_limit_s", "301")
    place.load("--launch.time_limit_s", "9", "--checkpoint.before_end_s", "8")
