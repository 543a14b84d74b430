"""A run from its config: inputs checked, the loop wired, started or continued, and summed up.

Owns the order in which a run begins and ends. Processes are `launch/`'s; the steps are `loop.py`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl import run_paths
from megarl.actor.flops import SequenceFlops
from megarl.actor.shape import read_shape
from megarl.buffer.buffer import Buffer
from megarl.config.render import trained_sides
from megarl.config.schema import Config
from megarl.config.served import served_block
from megarl.controller import parity
from megarl.controller.checkpoints import Checkpoints
from megarl.controller.colocated import make_turn
from megarl.controller.ending import Ending
from megarl.controller.evaluation import Evaluation
from megarl.controller.exports import Exports
from megarl.controller.loop import Loop
from megarl.controller.publisher import Publisher
from megarl.controller.resume import (
    SavedRun,
    newest,
    none_left,
    read_saved,
    set_aside,
    whole_checkpoints,
)
from megarl.errors import CheckpointError
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog, WandbRun
from megarl.observe.progress import Progress, end_table
from megarl.observe.samples import SampleLog
from megarl.prompts.dataset import load_prompts
from megarl.prompts.sampler import PromptSampler
from megarl.prompts.tokenizer import Tokenizer, load_tokenizer
from megarl.reward.scorer import Scorer
from megarl.rollout import calls
from megarl.rollout.collect import Collector
from megarl.rollout.pool import ServerPool
from megarl.types import Prompt, ServerEndpoint


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads before any engine starts."""

    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]
    eval_prompts: tuple[Prompt, ...]


def load_inputs(config: Config) -> Inputs:
    """Read tokenizer and prompt files. ConfigError, ModelError or DataError name what is wrong."""
    tokenizer = load_tokenizer(config.actor.model)
    for text in config.rollout.sampling.stop:
        tokenizer.stop_id(text)
    prompts = load_prompts(config, tokenizer)
    held_out: tuple[Prompt, ...] = ()
    if config.eval.prompts:
        held_out = load_prompts(config, tokenizer, config.eval.prompts, config.eval.max_prompts)
    return Inputs(tokenizer, prompts, held_out)


def note_on(config: Config, inputs: Inputs) -> str:
    """What a user may not have meant by these inputs; empty where there is nothing."""
    wanted, found = config.rollout.prompts_per_step, len(inputs.prompts)
    if wanted <= found:
        return ""
    return (
        f"rollout.prompts_per_step = {wanted}, and there are {found} prompts: a step has each "
        f"{'at least ' if wanted % found else ''}{wanted // found} times, as a group for itself"
    )


def finished_version(run_dir: Path) -> int:
    """The policy version that a run folder's newest whole checkpoint holds; 0 where it has none."""
    saved = newest(run_dir)
    return saved.version if saved else 0


async def train(
    config: Config,
    run_dir: Path,
    inputs: Inputs,
    reward: Scorer,
    learner: LearnerClient,
    servers: ServerPool,
    ending: Ending,
) -> None:
    """Run or continue the loop on engines that are up. Prints the end table."""
    wandb = WandbRun.start(config.observe.wandb, run_dir, config.model_dump())
    metrics = MetricsLog(run_dir, wandb)
    progress = Progress(config.loop.versions)
    rollout = Collector(config, servers, run_dir, inputs.tokenizer)
    turn = make_turn(config, learner, servers, metrics)
    checkpoints = Checkpoints(config, run_dir, learner, metrics, progress)
    try:
        loop = Loop(
            config=config,
            prompts=PromptSampler(inputs.prompts, config.run.seed, config.prompts.shuffle),
            rollout=rollout,
            reward=reward,
            buffer=Buffer(config, SequenceFlops.of(read_shape(config.actor.model))),
            learner=learner,
            weight_sync=Publisher(learner, servers, metrics, turn),
            turn=turn,
            evaluation=Evaluation(config, inputs.eval_prompts, rollout, reward),
            checkpoints=checkpoints,
            exports=Exports(config, run_dir, learner, metrics, progress),
            ending=ending,
            samples=SampleLog(run_dir),
            metrics=metrics,
            progress=progress,
        )
        saved = await restore_newest(loop, run_dir)
        start = await begin(loop, run_dir, saved, inputs, servers)
        await loop.run(start)
    finally:
        await checkpoints.close()
        await rollout.close()
        if wandb:
            wandb.close()
    progress.note(end_table(metrics.rows(), run_dir))


async def begin(
    loop: Loop, run_dir: Path, saved: SavedRun | None, inputs: Inputs, servers: ServerPool
) -> int:
    """Prove that both sides agree, publish; returns the first version, that of `saved`."""
    config = loop.config
    probes = inputs.prompts[: config.parity.num_prompts]
    gate, baseline = config.parity.enabled, None
    start = saved.version if saved else 0
    forget_from(loop, run_dir, start)
    await loop.turn.to("generating")
    if gate and not saved and served_block(config) is None:  # float8 servers start empty
        for server in servers.endpoints()[:1]:  # none where it died since it was up
            if not await calls.has_start_weights(servers.http, server):
                break  # it was there before this run, and another one has synced it
            baseline = await _difference(loop, probes, server)
            parity.check(config, baseline, None, "at start")
    loop.metrics.event("start", version=start, worst_staleness_steps=config.worst_staleness_steps)
    loop.progress.note(
        f"{'continuing' if saved else 'starting'} at version {start} of {config.loop.versions}: "
        f"{config.samples_per_step} samples a step, {trained_sides(config)}, "
        f"{config.rollout.servers} server(s) tp={config.rollout.parallel.tp}, "
        f"at most {config.worst_staleness_steps} optimizer steps stale"
    )
    await loop.turn.to("syncing")
    await loop.weight_sync.publish(start)
    await loop.turn.to("generating")
    if gate:
        async with servers.acquire(start) as server:
            mean = await _difference(loop, probes, server)
        parity.check(config, mean, baseline, "after the first weight sync")
    return start


async def _difference(loop: Loop, probes: Sequence[Prompt], server: ServerEndpoint) -> float:
    return await parity.mean_difference(loop.rollout, loop.learner, loop.turn, probes, server)


async def restore_newest(loop: Loop, run_dir: Path) -> SavedRun | None:
    """Continue from the newest checkpoint that is as it was saved; None where there are none.

    Damaged ones that are newer are told of and set aside. Raises CheckpointError where all are.
    """
    await loop.checkpoints.sweep()
    await loop.exports.sweep()
    damaged: dict[Path, str] = {}
    for path in reversed(whole_checkpoints(run_dir / run_paths.CHECKPOINTS)):
        try:
            saved = read_saved(path)
            problem = await loop.learner.check_saved(saved.weights)
        except CheckpointError as error:
            problem = str(error)
        if problem:
            damaged[path] = problem
            continue
        for other, problem in damaged.items():
            aside = set_aside(other)
            loop.progress.note(f"{problem}. It is now {aside}; continuing from {path.name}")
            loop.metrics.event("checkpoint_damaged", folder=str(aside), error=problem)
        await restore(loop, saved)
        return saved
    if damaged:
        raise none_left(list(damaged.values()))
    return None


async def restore(loop: Loop, saved: SavedRun) -> None:
    """Weights, optimizer, random state and prompt cursor of `saved`."""
    version = await loop.learner.load(str(saved.weights))
    if version != saved.version:
        raise CheckpointError(
            f"{saved.path}: the learner's part is version {version}, its state says "
            f"{saved.version}; remove that folder to continue from an older one"
        )
    loop.prompts.restore(dict(saved.prompts))


def forget_from(loop: Loop, run_dir: Path, version: int) -> None:
    """Drop the numbers and samples of the steps from `version` on, which are done again."""
    dropped = loop.metrics.keep_before(version)
    for folder in (run_dir / run_paths.ROLLOUTS).glob("v*"):
        if run_paths.is_version(folder) and run_paths.version_of(folder) >= version:
            shutil.rmtree(folder)
    if dropped or version:
        loop.metrics.event("resume", version=version, steps_done_again=dropped)
