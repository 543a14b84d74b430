"""What combinations of settings, the model and files allow; all violations at once.

Owns the arithmetic between settings and its words. Must not know where the settings came from, and
imports no engine: what the engines allow is written down here, with its source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.config.bounds import PROBE_CONTEXT
from megarl.config.check_critic import check_critic, check_critic_model
from megarl.config.check_fp8 import check_fp8, check_fp8_shape
from megarl.config.check_machine import check_machine
from megarl.config.check_model import (
    LENGTHS,
    check_model_files,
    check_shape,
    check_trained,
    longest_sample,
)
from megarl.config.check_optimizer import check_offload
from megarl.config.check_parallel import check_ranks, check_runnable, check_servers
from megarl.config.check_recompute import check_recompute, check_recompute_shape
from megarl.config.check_reference import check_reference, check_reference_shape
from megarl.config.check_servers import check_sync, check_urls
from megarl.config.layouts import learner_layout, trained_shape
from megarl.config.optimizer import OptimizerConfig
from megarl.config.schema import Config
from megarl.config.served import check_float8
from megarl.config.transformer_fields import field_violations
from megarl.config.violation import Violation
from megarl.errors import LayoutError, ModelError
from megarl.reshard.files import layout_of_headers, policy_headers


def check_config(config: Config) -> list[Violation]:
    """Everything that keeps `config` from running here, with the model folder read once."""
    model = Path(config.actor.model)
    found: list[Violation] = []
    shape: ModelShape | None = None
    untrained: list[Violation] = []
    try:
        shape = read_shape(model)
        untrained = list(check_trained(model, shape))
        if not untrained:
            policy = block_table(trained_shape(shape))
            layout_of_headers(policy_headers(model, block_table(shape), policy), policy)
    except (ModelError, LayoutError) as error:
        found.append(Violation(str(error), ("actor.model",)))
    found += untrained
    if os.path.isdir(model):
        found += check_model_files(config, model)
    found += check_settings(config)
    if shape is not None and not untrained:
        found += check_shape(config, shape)
        found += check_fp8_shape(config, shape)
        found += check_recompute_shape(config, shape)
        found += check_reference_shape(config, shape)
        found += [] if found else _laid_out(config, shape)
        found += check_critic_model(config, shape)
    found += check_servers(config, None if untrained else shape)
    found += check_machine(config, os.environ)
    return found


def _laid_out(config: Config, shape: ModelShape) -> Iterator[Violation]:
    """What the learner's layout says itself: of pipelines that are not even, and of float8."""
    try:
        layout = learner_layout(config, trained_shape(shape))
        yield from check_float8(config, trained_shape(shape), layout)
    except LayoutError as error:
        names = ("pp", "first_stage_layers", "last_stage_layers", "pipeline_layout")
        yield Violation(str(error), tuple(f"learner.parallel.{name}" for name in names))


def check_settings(config: Config) -> list[Violation]:
    """Settings against each other, and the files they name."""
    checks = (
        _names,
        _batches,
        check_ranks,
        check_runnable,
        _lengths,
        _probe,
        check_urls,
        check_sync,
        _transformer_fields,
        _schedules,
        check_fp8,
        check_critic,
        check_recompute,
        check_offload,
        check_reference,
        _prompts,
        _reward,
        _evaluation,
        _time_limit,
    )
    return [violation for check in checks for violation in check(config)]


def _names(config: Config) -> Iterator[Violation]:
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        yield Violation(
            f"run.name = {name!r} is no name of a folder; the run folder is run.dir/run.name",
            ("run.name",),
        )


def _batches(config: Config) -> Iterator[Violation]:
    rollout, samples = config.rollout, config.samples_per_step
    steps = config.learner.optimizer_steps_per_rollout
    sizes = ("rollout.prompts_per_step", "rollout.samples_per_prompt")
    if samples % steps:
        yield Violation(
            f"rollout.prompts_per_step x rollout.samples_per_prompt = {rollout.prompts_per_step} x "
            f"{rollout.samples_per_prompt} = {samples} samples do not split into "
            f"learner.optimizer_steps_per_rollout = {steps} minibatches of one size; "
            f"use a number that divides {samples}",
            (*sizes, "learner.optimizer_steps_per_rollout"),
        )
    if rollout.samples_per_prompt == 1 and config.advantage.estimator == "grpo":
        yield Violation(
            "rollout.samples_per_prompt = 1 leaves advantage.estimator = grpo nothing to compare: "
            "every advantage is 0; use 2 or more",
            ("rollout.samples_per_prompt",),
        )
    if rollout.max_inflight_samples < rollout.samples_per_prompt:
        yield Violation(
            f"rollout.max_inflight_samples = {rollout.max_inflight_samples} is below "
            f"rollout.samples_per_prompt = {rollout.samples_per_prompt}, and a group is asked for "
            "in one request; raise it",
            ("rollout.max_inflight_samples", "rollout.samples_per_prompt"),
        )


def _lengths(config: Config) -> Iterator[Violation]:
    longest, words = longest_sample(config)
    microbatch, cache = config.learner.max_tokens_per_microbatch, config.rollout.max_total_tokens
    if longest > microbatch and config.learner.overlong_samples == "error":
        yield Violation(
            f"{words} exceed learner.max_tokens_per_microbatch = {microbatch}, and a sample is "
            f"never split; raise it to {longest} or more, lower the lengths, or set "
            "learner.overlong_samples to truncate or filter",
            (*LENGTHS, "learner.max_tokens_per_microbatch", "learner.overlong_samples"),
        )
    if cache and longest > cache:
        yield Violation(
            f"{words} exceed rollout.max_total_tokens = {cache}, the whole KV cache of a server; "
            f"raise it to {longest} or more, or lower the lengths",
            (*LENGTHS, "rollout.max_total_tokens"),
        )


def _probe(config: Config) -> Iterator[Violation]:
    """The probe of a weight sync is scored whole, with the tokens before those that count."""
    num_tokens = config.weight_sync.probe_tokens + PROBE_CONTEXT
    limits = (
        ("learner.max_tokens_per_microbatch", config.learner.max_tokens_per_microbatch),
        ("rollout.max_total_tokens", config.rollout.max_total_tokens),
    )
    for name, limit in limits:
        if limit and num_tokens > limit:
            yield Violation(
                f"weight_sync.probe_tokens = {config.weight_sync.probe_tokens} and the "
                f"{PROBE_CONTEXT} tokens before them exceed {name} = {limit}; lower it",
                ("weight_sync.probe_tokens", name),
            )


def _transformer_fields(config: Config) -> Iterator[Violation]:
    for text in field_violations(config.learner.transformer_config):
        yield Violation(text, ("learner.transformer_config",))


def _schedules(config: Config) -> Iterator[Violation]:
    """What falls has to fall, from above and after it has risen."""
    yield from _schedule(config.learner.optimizer, "learner.optimizer", config.decay_steps)
    if config.has_critic:
        yield from _schedule(config.critic.optimizer, "critic.optimizer", config.critic_decay_steps)


def _schedule(optimizer: OptimizerConfig, group: str, last: int) -> Iterator[Violation]:
    if optimizer.schedule == "constant":
        for name in ("min_lr", "decay_steps"):
            if getattr(optimizer, name):
                found = getattr(optimizer, name)
                yield _pointless(f"{group}.{name}", found, f"{group}.schedule", "constant")
        return
    if optimizer.min_lr > optimizer.lr:
        yield Violation(
            f"{group}.min_lr = {optimizer.min_lr} is above {group}.lr = {optimizer.lr}; lower it",
            (f"{group}.min_lr", f"{group}.lr"),
        )
    if last <= optimizer.warmup_steps:
        whole = "" if optimizer.decay_steps else ", the whole run,"
        yield Violation(
            f"{group}.schedule = {optimizer.schedule} ends at optimizer step {last}"
            f"{whole} when {group}.warmup_steps = {optimizer.warmup_steps} are not over; lower "
            "them, or raise decay_steps",
            tuple(f"{group}.{name}" for name in ("decay_steps", "warmup_steps", "schedule")),
        )


def _prompts(config: Config) -> Iterator[Violation]:
    prompts = config.prompts
    generated = prompts.format == "reasoning_gym"
    if generated and not prompts.task:
        yield Violation(
            "prompts.format = reasoning_gym needs prompts.task, the name of one of its tasks",
            ("prompts.format", "prompts.task"),
        )
    if generated and not prompts.num_prompts:
        yield Violation(
            "prompts.num_prompts = 0 generates no prompt; use 1 or more", ("prompts.num_prompts",)
        )
    if generated and prompts.path:
        yield _pointless("prompts.path", prompts.path, "prompts.format", prompts.format)
    if not generated and prompts.task:
        yield _pointless("prompts.task", prompts.task, "prompts.format", prompts.format)
    if not generated and prompts.task_args:
        yield _pointless("prompts.task_args", prompts.task_args, "prompts.format", prompts.format)
    if prompts.system and prompts.template == "none":
        yield _pointless("prompts.system", prompts.system, "prompts.template", prompts.template)
    if not generated:
        yield from _file(
            "prompts.path", prompts.path, f"prompts.format = {prompts.format} needs it"
        )


def _evaluation(config: Config) -> Iterator[Violation]:
    evaluation = config.eval
    if evaluation.prompts and config.prompts.format == "reasoning_gym":
        yield _pointless("eval.prompts", evaluation.prompts, "prompts.format", "reasoning_gym")
    elif evaluation.prompts:
        yield from _file("eval.prompts", evaluation.prompts, "")
    elif evaluation.every:
        yield Violation(
            f"eval.every = {evaluation.every} without eval.prompts evaluates nothing; name a "
            "prompt file, or use 0",
            ("eval.every", "eval.prompts"),
        )


def _reward(config: Config) -> Iterator[Violation]:
    kind, function = config.reward.kind, config.reward.function
    if kind == "reasoning_gym" and config.prompts.format != "reasoning_gym":
        yield Violation(
            "reward.kind = reasoning_gym scores only what prompts.format = reasoning_gym "
            f"generates; found prompts.format = {config.prompts.format}",
            ("reward.kind", "prompts.format"),
        )
    if kind != "function":
        if function:
            yield _pointless("reward.function", function, "reward.kind", kind)
        return
    path, _, name = function.rpartition(":")
    if not path or not name.isidentifier():
        yield Violation(
            f"reward.kind = function needs reward.function as path/to/file.py:name; "
            f"found {function!r}",
            ("reward.kind", "reward.function"),
        )
    else:
        yield from _file("reward.function", path, "")


def _time_limit(config: Config) -> Iterator[Violation]:
    limit_s, before_s = config.launch.time_limit_s, config.checkpoint.before_end_s
    names = ("launch.time_limit_s", "checkpoint.before_end_s")
    found = f"launch.time_limit_s = {limit_s:g} with checkpoint.before_end_s = {before_s:g}"
    if 0 < limit_s <= before_s:
        why = "the run would end as soon as it began; raise the one or lower the other"
        yield Violation(f"{found}: {why}", names)
    elif limit_s and not before_s:
        why = "0 does not watch the time, so that nothing would end"
        yield Violation(f"{found}: {why}; give it the seconds that a save needs", names)


def _file(name: str, path: str, need: str) -> Iterator[Violation]:
    if not path:
        yield Violation(f"{name} is not set; {need}", (name,))
    elif not os.path.isfile(path):
        found = "is a folder" if os.path.isdir(path) else "does not exist"
        yield Violation(f"{name}: {path} {found}; name an existing file", (name,))


def _pointless(name: str, value: object, because: str, found: str) -> Violation:
    return Violation(
        f"{name} = {value!r} has no meaning with {because} = {found}; remove one", (name, because)
    )
