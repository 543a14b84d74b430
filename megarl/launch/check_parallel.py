"""`megarl check parallel`: one minibatch in a run's learner layout and in the smallest, compared.

Owns which layouts are tried, the few layers and the minibatch that they are tried on, and the
verdict: where the configured layout disagrees, its axes are switched off one by one to say which
is to blame. The comparison itself is `learner/layout_check.py`'s, in processes of its own.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl import run_paths
from megarl.actor.flops import SequenceFlops
from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.buffer.groupfile import read_group, write_group
from megarl.buffer.schedule import ScheduleShape, make_schedule
from megarl.config.check_model import check_trained, uses_cpu
from megarl.config.check_parallel import COUNTED_ENDS
from megarl.config.layouts import critic_settings, learner_layout, trained_shape
from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, LaunchError
from megarl.launch.few_layers import layers_kept, write_few_layers
from megarl.linux import available_bytes
from megarl.nodes import visible_gpus
from megarl.reshard.files import INDEX, SINGLE
from megarl.reshard.page import bytes_text, count_text
from megarl.types import Group, Prompt, Sample, SampleRef

NUM_SAMPLES = 8
LONGEST = 48  # tokens of a generated sample
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (2e-2, 5e-2)}
"""Of the loss, relative, and of each gradient tensor, relative L2. Sums in another order cost about
1e-6 in float32 and 1e-2 in bfloat16; a wrong factor or a lost token costs more than both."""

AXES = ("vpp", "cp", "etp", "ep", "sequence_parallel", "pp", "tp", "dp")
WORDS = {
    "vpp": "virtual pipeline",
    "cp": "context",
    "etp": "expert tensor",
    "ep": "expert",
    "sequence_parallel": "sequence",
    "pp": "pipeline",
    "tp": "tensor",
    "dp": "data",
}
TIMEOUT_S = 1800.0
WEIGHT_AND_GRADIENT = 8  # bytes of a parameter on CPUs, where both are fp32


@dataclass(frozen=True)
class Sizes:
    """The axes of a learner layout that a check switches off."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sequence_parallel: bool = True

    @property
    def ranks(self) -> int:
        """Processes of the layout."""
        return self.tp * self.pp * self.cp * self.dp

    def has(self, axis: str) -> bool:
        """Whether an axis is in use."""
        if axis == "sequence_parallel":
            return self.sequence_parallel and self.tp > 1
        return int(getattr(self, axis)) > 1

    def filled(self) -> Sizes:
        """The same with as many replicas as the experts' axes need to divide the stage."""
        dp = self.dp
        while self.tp * self.cp * dp % (self.ep * self.etp):
            dp += 1
        return replace(self, dp=dp)

    def without(self, axis: str) -> Sizes:
        """The same with one axis off; no stages means no chunks either.

        >>> Sizes(pp=2, vpp=2, cp=2, ep=2).without("cp").dp
        2
        """
        off: dict[str, Any] = {axis: False if axis == "sequence_parallel" else 1}
        changed = replace(self, **off)
        return (replace(changed, vpp=1) if axis == "pp" else changed).filled()

    def __str__(self) -> str:
        names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        words = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1]
        words += ["sequence_parallel=false"] if self.tp > 1 and not self.sequence_parallel else []
        return " ".join(words) or "one rank"


def configured_sizes(config: Config) -> Sizes:
    """The layout of a run, with two replicas where there are more: they all do the same."""
    parallel = config.learner.parallel
    return Sizes(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        dp=min(config.data_parallel, 2),
        sequence_parallel=parallel.sequence_parallel,
    ).filled()


def trials(sizes: Sizes, has_experts: bool) -> dict[str, Sizes]:
    """The layouts with one axis off, by axis, that differ from `sizes` and from one rank."""
    found = {}
    for axis in AXES:
        if axis == "sequence_parallel" and has_experts:
            continue  # experts are not trained without it
        changed = sizes.without(axis)
        if sizes.has(axis) and changed not in (sizes, Sizes()):
            found[axis] = changed
    return found


@dataclass(frozen=True)
class Result:
    """What a layout answered: its loss, and how far each gradient is from the smallest layout's."""

    loss: float
    off: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor whose gradient is most off, and how far."""
        return max(self.off.items(), key=lambda item: item[1])


class Comparison:
    """Layouts of a few layers of a model on one minibatch, each tried when it is asked for."""

    def __init__(self, config: Config, folder: Path, shape: ModelShape, refs: list[SampleRef]):
        self._config, self._folder, self._refs = config, folder, refs
        self._shape = shape
        self.precision = "fp32" if uses_cpu(config) else "bf16"

    def run(self, layouts: Mapping[str, Sizes], program: Sequence[str]) -> dict[str, Result]:
        """What each layout answers; the first of all runs must be "smallest".

        Raises LaunchError where a rank fails.
        """
        written = self._folder / f"{'-'.join(layouts)}.json"
        written.write_text(json.dumps([self._trial(n, s) for n, s in layouts.items()]))
        ranks = max(sizes.ranks for sizes in layouts.values())
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        log = written.with_suffix(".log")
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, *torchrun, *program, str(self._folder), str(written)],
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=TIMEOUT_S,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        if done.returncode:
            raise LaunchError(f"a layout of the check failed:\n{_error_in(log)}")
        found = {}
        for name in layouts:
            answer = json.loads((self._folder / f"{name}.result.json").read_text())
            found[name] = Result(answer["loss"], answer["off"])
        return found

    def agrees(self, result: Result, smallest: Result) -> bool:
        """Whether a layout computes what the smallest does."""
        loss_bound, gradient_bound = BOUNDS[self.precision]
        return self.loss_off(result, smallest) < loss_bound and result.worst[1] < gradient_bound

    def loss_off(self, result: Result, smallest: Result) -> float:
        """The relative difference of a layout's loss."""
        return abs(result.loss - smallest.loss) / max(abs(smallest.loss), 1e-12)

    def line(self, name: str, sizes: Sizes, result: Result, smallest: Result) -> str:
        """A layout's differences, in words."""
        tensor, off = result.worst
        return (
            f"{name}: {sizes} ({sizes.ranks} ranks): loss off by "
            f"{self.loss_off(result, smallest):.1e}, gradients by {off:.1e} at most ({tensor})"
        )

    def _trial(self, name: str, sizes: Sizes) -> dict[str, object]:
        config = self._config.model_dump()
        learner = config["learner"]
        longest = max(ref.num_tokens for ref in self._refs)
        budget = max(longest, sum(ref.num_tokens for ref in self._refs) // 3)
        learner["parallel"] = {name: value for name, value in asdict(sizes).items() if name != "dp"}
        learner["precision"]["params"] = self.precision
        learner["max_tokens_per_microbatch"] = budget
        fields = learner["transformer_config"]
        learner["transformer_config"] = {k: v for k, v in fields.items() if k not in COUNTED_ENDS}
        config["actor"]["model"] = str(self._folder / "model")
        config["kl"]["coef"] = 0.0
        config["advantage"]["estimator"] = "grpo"  # of the policy: no critic is built
        config["placement"] |= {"mode": "disaggregated", "learner_gpus": sizes.ranks}
        config["weight_sync"]["shared_weights"] = False
        checked = Config.model_validate(config)
        learner_layout(checked, trained_shape(self._shape))  # LayoutError where it does not divide
        flops = SequenceFlops.of(self._shape)
        plan = make_schedule(self._refs, ScheduleShape(sizes.dp, budget, flops, sizes.pp > 1))
        return {"name": name, "ranks": sizes.ranks, "config": config, "plan": asdict(plan)}


def run_check_parallel(
    config: Config,
    batch: Path | None = None,
    program: Sequence[str] = ("-m", "megarl.learner.layout_check"),
) -> tuple[int, str]:
    """Check the learner layout of `config`, and that of a critic with ranks of its own, by the
    policy's loss on its layers; returns the exit status and what was found, in lines.

    `batch` is the folder of a run whose samples are taken; None: they are drawn. 0 where the
    layouts agree, 1 where not. Raises MegarlError where a layout cannot run here.
    """
    status, text = _check_layout(config, batch, program)
    if not config.critic_is_apart:
        return status, text
    actor = config.actor.model_copy(update={"model": config.critic_model})
    theirs = critic_settings(config).model_copy(update={"actor": actor})
    their_status, their_text = _check_layout(theirs, batch, program)
    return max(status, their_status), f"learner.parallel\n{text}\ncritic.parallel\n{their_text}"


def _check_layout(config: Config, batch: Path | None, program: Sequence[str]) -> tuple[int, str]:
    """One layout, as `run_check_parallel` says."""
    model = Path(config.actor.model)
    shape = read_shape(model)
    refused = [violation.text for violation in check_trained(model, shape)]
    if refused:
        raise ConfigError(refused)
    sizes = configured_sizes(config)
    _check_room(config, sizes)
    layers = layers_kept(shape, sizes.pp * sizes.vpp)
    if uses_cpu(config):
        _check_memory(shape, layers)
    with tempfile.TemporaryDirectory(prefix="megarl-check-") as name:
        folder = Path(name)
        has_weights = (model / SINGLE).is_file() or (model / INDEX).is_file()
        is_random = not has_weights or layers > shape.num_layers
        seed = config.run.seed if is_random else None
        write_few_layers(model, folder / "model", layers, seed)
        few = read_shape(folder / "model")
        refs = _recorded(batch, config) if batch else _drawn(folder, few, config.run.seed)
        comparison = Comparison(config, folder, few, refs)
        tokens = sum(ref.num_tokens for ref in refs)
        lines = [
            f"model: {layers} of {shape.num_layers} layers, "
            f"{'random' if is_random else 'its own'} weights, {comparison.precision}; "
            f"{len(refs)} samples {f'of {batch}' if batch else 'drawn'}, {tokens} tokens"
        ]
        status, verdict = _verdict(comparison, sizes, few.moe is not None, program, lines)
        return status, "\n".join([*lines, verdict]) + "\n"


def _verdict(
    comparison: Comparison,
    sizes: Sizes,
    has_experts: bool,
    program: Sequence[str],
    lines: list[str],
) -> tuple[int, str]:
    """The exit status and the last line; `lines` get what each layout answered."""
    if sizes == Sizes():
        return 0, "parallel: the layout is one rank already; there is nothing to compare"
    found = comparison.run({"smallest": Sizes(), "configured": sizes}, program)
    smallest, result = found["smallest"], found["configured"]
    lines.append(f"smallest: one rank: loss {smallest.loss:.7g}")
    lines.append(comparison.line("configured", sizes, result, smallest))
    if comparison.agrees(result, smallest):
        return 0, "parallel: the layout computes what one rank does"
    fewer = trials(sizes, has_experts)
    without = comparison.run(fewer, program) if fewer else {}
    blamed = []
    for axis, changed in fewer.items():
        lines.append(comparison.line(f"without {axis}", changed, without[axis], smallest))
        if comparison.agrees(without[axis], smallest):
            blamed.append(axis)
    if not fewer:
        blamed = [axis for axis in AXES if sizes.has(axis)][:1]
    if not blamed:
        return 1, "wrong: the layout disagrees with one rank whichever axis is off: more than one"
    if "vpp" in blamed and "pp" in blamed:
        blamed.remove("pp")  # without stages there are no chunks
    told = " or ".join(f"{axis} ({WORDS[axis]} parallelism)" for axis in blamed)
    return 1, f"wrong: {told} disagrees: without it the layout computes what one rank does"


def _check_room(config: Config, sizes: Sizes) -> None:
    """Raise LaunchError where this machine has not the GPUs for the ranks."""
    gpus = visible_gpus(os.environ)
    if not uses_cpu(config) and sizes.ranks > gpus:
        raise LaunchError(
            f"the layout {sizes} has {sizes.ranks} ranks, and this machine {gpus} GPUs; check it "
            "on one with more, a smaller layout, or with --launch.device cpu"
        )


def _check_memory(shape: ModelShape, layers: int) -> None:
    """Raise LaunchError where one rank of the few layers has no room, on CPUs in fp32."""
    few = replace(trained_shape(shape), num_layers=layers)
    number = sum(math.prod(parameter.shape) for parameter in block_table(few).parameters)
    needed, there = number * WEIGHT_AND_GRADIENT, available_bytes()
    if needed > there > 0:
        raise LaunchError(
            f"the check takes {layers} layers at full width, with embedding and output, "
            f"{count_text(number)} parameters: {bytes_text(needed)} of weights and gradients in "
            f"fp32, and {bytes_text(there)} of memory are free here; check on GPUs, on a machine "
            "with more memory, or a narrower model (a folder with a smaller config.json will do)"
        )


def _drawn(folder: Path, shape: ModelShape, seed: int) -> list[SampleRef]:
    """Samples of uneven lengths, a fifth of whose response tokens the loss does not see."""
    draw, samples = random.Random(seed), []
    longest = min(LONGEST, shape.max_positions)
    for index in range(NUM_SAMPLES):
        length = draw.randrange(longest // 4, longest + 1)
        tokens = [draw.randrange(shape.vocab_size) for _ in range(length)]
        cut = draw.randrange(1, length)
        sample = Sample(f"drawn.{index}", "drawn", "drawn", tuple(tokens[:cut]))
        for at, token in enumerate(tokens[cut:]):
            sample = sample.extended([token], [0.0], version=0, trainable=at % 5 != 3)
        samples.append(sample)
    path = write_group(folder, Group("drawn", Prompt("drawn", (), "", ""), tuple(samples)))
    return _refs({path: range(NUM_SAMPLES)}, draw)


def _recorded(run: Path, config: Config) -> list[SampleRef]:
    """The first samples of a run's last rollouts. Raises DataError where it has none."""
    files = sorted((run / run_paths.ROLLOUTS).glob("v*/*.safetensors"), reverse=True)
    rows: dict[str, Sequence[int]] = {}
    left = NUM_SAMPLES
    for file in files:
        group = read_group(file)
        usable = [i for i in range(len(group)) if group.sample(i).loss_mask.any()][:left]
        if usable:
            rows[str(file)] = usable
        left -= len(usable)
        if left == 0:
            break
    if not rows:
        raise DataError(
            f"{run / run_paths.ROLLOUTS} has no samples with loss tokens; give --batch "
            "the folder of a run that has finished a step"
        )
    return _refs(rows, random.Random(config.run.seed))


def _refs(rows: Mapping[str, Sequence[int]], draw: random.Random) -> list[SampleRef]:
    """References to rows of group files, with advantages that are drawn."""
    found = []
    for path, indices in rows.items():
        group = read_group(path)
        for index in indices:
            sample = group.sample(index)
            mask = int(sample.loss_mask.sum())
            advantage = draw.uniform(-1.0, 2.0)
            found.append(
                SampleRef(sample.sample_id, path, index, len(sample.tokens), mask, advantage, 0)
            )
    return found


def _error_in(log: Path) -> str:
    """The last error that a rank wrote, or the last lines."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
    return errors[-1] if errors else "\n".join(lines[-15:])
