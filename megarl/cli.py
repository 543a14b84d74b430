"""The command line: its commands, their form, help and exit status.

What a command does is elsewhere: settings are described by `config/`, a run is made by `launch/`,
checkpoints are read and written by `convert/`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from megarl import __version__
from megarl.config.check_critic import check_critic
from megarl.config.load import load_config, load_layout, read_config
from megarl.config.render import render_config, toml_value
from megarl.config.schema import Config
from megarl.config.settings import (
    Setting,
    SettingGroup,
    nearest_name,
    setting_groups,
)
from megarl.config.toml import shortened
from megarl.config.violation import Violation
from megarl.errors import ConfigError, MegarlError, RewardError
from megarl.reshard.fabric import DEFAULT, FABRICS, fabric_of
from megarl.reshard.mesh import MAX_RANKS
from megarl.reward.function import load_function
from megarl.rollout.engine_args import violations

COMMANDS = ("train", "config", "check", "memory", "reshard", "convert", "inspect", "compare")
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
WIDTH = 100

USAGE = """\
megarl: reinforcement learning for language models; Megatron-Core learns, SGLang generates.

  megarl train CONFIG [--group.setting VALUE ...]    run, or continue, what CONFIG describes
  megarl check sync CONFIG [--group.setting VALUE ...] [--dry]
                                                     start the engines and check one weight sync
  megarl check fp8 CONFIG [--group.setting VALUE ...] [--dry]
                                                     compare the learner in FP8 with it in bf16
  megarl check parallel CONFIG [--group.setting VALUE ...] [--batch RUN_DIR]
                                                     compare the learner's layout with one rank
  megarl config CONFIG [--group.setting VALUE ...]   print every setting, resolved and checked
  megarl memory CONFIG [--group.setting VALUE ...] [--json]
                                                     what learner ranks take, before a start
  megarl reshard explain CONFIG [--group.setting VALUE ...] [--tensor NAME] [--json]
                                                     how weights travel from learner to servers
  megarl convert SRC DST [--dtype bf16] [--dry-run]  make a checkpoint in the other format
  megarl inspect CKPT                                what is in a checkpoint
  megarl compare A B                                 compare two checkpoints, element by element
  megarl help [NAME]                                 describe a command, a setting, a group of them,
                                                     or all settings
  megarl --version

CONFIG is a TOML file. --group.setting=VALUE works too, and a flag alone means true.
"""

RESHARD = f"""\
megarl reshard explain CONFIG [--group.setting VALUE ...]   how weights travel, from settings alone

  --tensor NAME         besides, the way of one tensor by its name in a Hugging Face checkpoint; the
                        number of an expert may be *
  --fabric NAME         rates that seconds are predicted with, default {DEFAULT}; one of
                        {", ".join(FABRICS)}
  --gpus-per-node N     GPUs that share NVLink; default that of the fabric
  --json                one JSON object instead of a page

Needs no GPU, no engine and of actor.model only config.json. It plans more than a run can do yet.
"""


MEMORY = """\
megarl memory CONFIG [--group.setting VALUE ...] [--json]   what learner ranks take, from settings

Bytes of a rank of each pipeline stage: weights, gradients, optimizer, activations kept for the
backward pass, the most on the device in each phase (score, train, sync; colocated offloaded), and
host memory. With --json one JSON object instead of a page.

Needs no GPU, no engine and of actor.model only config.json; launch.device = auto means GPUs. Try a
layout on it: --learner.parallel.tp 8 --placement.learner_gpus 64, --learner.recompute.granularity
full, --learner.max_tokens_per_microbatch 4096. docs/memory.md says what is counted.
"""


CHECK = """\
megarl check sync CONFIG [--group.setting VALUE ...]   check one weight sync on the engines of a run

Starts the servers and the learner, spoils the servers' weights, publishes the learner's, and
compares: the sync's own proofs, SGLang's checksums of what it loaded itself, log-probs. Says in
words what is wrong and where; the exit status is 1 then. The folder of the run is not touched.

  --dry                 start nothing; print the plan, its bytes, and how servers will be treated

megarl check fp8 CONFIG [--group.setting VALUE ...]    compare the learner in FP8 with it in bf16

Starts the learner alone, computes one golden batch in both, and compares loss, log-probs and the
gradient of each layer (docs/fp8.md). The exit status is 1 where a bound is exceeded.

  --dry                 start nothing; print Megatron's fields, what is compared, what is refused
  --batch FOLDER        group files of the golden batch; default those of the run's first version
  --emulate             on CPUs: round numbers as the recipe does. It measures, and never trains

megarl check parallel CONFIG [--group.setting VALUE ...]   compare the layout with one rank

Runs a few layers of actor.model (its weights, or random ones where it has only a config.json) on
one minibatch, in the learner's layout and on one rank, on this machine, and compares the loss and
each gradient. Where they disagree it switches the axes off one by one and says which is to blame;
the exit status is 1 then. Of replicas it takes two at most. In fp32 on CPUs, in bf16 on GPUs.

  --batch RUN_DIR       take samples of that run's rollouts instead of drawing some
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    0 done, 1 a run failed, 2 the input is wrong, 130 interrupted, else that of the run. Errors
    that a user is meant to read go to stderr without a traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(given)
    except ConfigError as error:
        _complain(error.violations)
        return error.exit_status
    except MegarlError as error:
        _complain([str(error)])
        return error.exit_status
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "megarl":
            raise
        _complain([f"the package {error.name} is not installed here; `make venv` installs it all"])
        return 1
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output, such as head, has seen enough.
        _silence_stdout()
        return 0


def _dispatch(given: list[str]) -> int:
    match given:
        case [] | ["-h" | "--help"] | ["help", "-h" | "--help"]:
            _print(USAGE)
        case ["--version"]:
            _print(f"megarl {__version__}\n")
        case ["train" | "config", *rest] if "-h" in rest or "--help" in rest:
            _print(f"{USAGE}\n{_reference(setting_groups())}\n")
        case ["train", path, *overrides] if not path.startswith("-"):
            return _train(path, overrides)
        case ["config", path, *overrides] if not path.startswith("-"):
            _print(render_config(load_config(path, overrides, [_engine_args, _reward_function])))
        case ["memory", *rest] if not rest or "-h" in rest or "--help" in rest:
            _print(MEMORY)
        case ["memory", path, *rest] if not path.startswith("-"):
            _print(f"{_memory(path, rest)}\n")
        case ["reshard", *rest] if not rest or "-h" in rest or "--help" in rest:
            _print(RESHARD)
        case ["reshard", "explain", path, *rest] if not path.startswith("-"):
            _print(f"{_explain(path, rest)}\n")
        case ["reshard", *_]:
            raise ConfigError(
                "megarl reshard takes explain and a TOML file first: megarl reshard explain CONFIG"
            )
        case ["check", *rest] if not rest or "-h" in rest or "--help" in rest:
            _print(CHECK)
        case ["check", "sync", path, *rest] if not path.startswith("-"):
            return _check_sync(path, rest)
        case ["check", "fp8", path, *rest] if not path.startswith("-"):
            return _check_fp8(path, rest)
        case ["check", "parallel", path, *rest] if not path.startswith("-"):
            return _check_parallel(path, rest)
        case ["check", *_]:
            raise ConfigError(
                "megarl check takes sync, fp8 or parallel and a TOML file: megarl check sync CONFIG"
            )
        case ["convert" | "inspect" | "compare" as command, *rest]:
            return _on_checkpoints(command, rest)
        case ["train" | "config" | "memory" as command, *_]:
            raise ConfigError(
                f"megarl {command} needs a TOML file first: megarl {command} CONFIG [--name value]"
            )
        case ["help", command] if command in COMMANDS:
            return _dispatch([command, "--help"])
        case ["help"]:
            _print(f"{_reference(setting_groups())}\n")
        case ["help", name]:
            _print(f"{_reference(_matching(name))}\n")
        case [command, *_]:
            raise ConfigError(
                f"{command!r} is no command of megarl; use {', '.join(COMMANDS)} or help"
            )
    return 0


def _print(text: str) -> None:
    """Writes to stdout at once, so that a failure is seen here. Raises MegarlError.

    What stdout's encoding has no character for, in a path or a name of a tensor, is escaped.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence_stdout()
        raise MegarlError(f"stdout: {error.strerror}; write to a place that has room") from error


def _silence_stdout() -> None:
    """What is still in stdout's buffer goes nowhere, or Python would fail on it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _train(path: str, overrides: list[str]) -> int:
    from megarl.launch.run import run_training  # other commands must work without its imports

    config = _load(path, overrides)
    return run_training(config, Path(config.run.dir).absolute() / config.run.name)


def _check_sync(path: str, arguments: list[str]) -> int:
    from megarl.launch.check_sync import explain_sync, run_check_sync  # as for _train

    overrides = [argument for argument in arguments if argument != "--dry"]
    config = _load(path, overrides)
    if len(overrides) == len(arguments):
        status, text = run_check_sync(config)
        _print(text)
        return status
    _print(explain_sync(config))
    return 0


def _check_fp8(path: str, arguments: list[str]) -> int:
    from megarl.launch.check_fp8 import explain_fp8, golden_batch, run_check_fp8  # as for _train

    flags, overrides = _flags(arguments, ("--dry", "--emulate"), ("--batch",))
    config = read_config(path, overrides)  # what a learner of FP8 needs is checked there
    batch = golden_batch(config, flags.get("--batch", ""))
    if "--dry" in flags:
        _print(explain_fp8(config, batch))
        return 0
    status, text = run_check_fp8(config, batch, "--emulate" in flags)
    _print(text)
    return status


def _check_parallel(path: str, arguments: list[str]) -> int:
    from megarl.launch.check_parallel import run_check_parallel  # as for _train

    flags, overrides = _flags(arguments, (), ("--batch",))
    batch = Path(flags["--batch"]).absolute() if "--batch" in flags else None
    status, text = run_check_parallel(load_layout(path, overrides, (check_critic,)), batch)
    _print(text)
    return status


def _on_checkpoints(command: str, arguments: list[str]) -> int:
    from megarl.convert import commands  # as for _train; some read with torch

    if not arguments or "-h" in arguments or "--help" in arguments:
        _print(commands.HELP[command])
        return 0
    flags, paths = _flags(arguments, *commands.OPTIONS[command])
    status, text = commands.run(command, paths, flags)
    _print(text)
    return status


def _explain(path: str, arguments: list[str]) -> str:
    from megarl.config.explain import explain_run  # other commands start without the planner

    flags, overrides = _flags(arguments, ("--json",), ("--tensor", "--fabric", "--gpus-per-node"))
    config = load_layout(path, overrides, [_engine_args])
    return explain_run(
        config,
        tensor=flags.get("--tensor"),
        fabric=fabric_of(flags.get("--fabric", DEFAULT)),
        gpus_per_node=_number("--gpus-per-node", flags.get("--gpus-per-node")),
        as_json="--json" in flags,
    )


def _memory(path: str, arguments: list[str]) -> str:
    from megarl.planning.page import memory_plan  # as for _explain

    flags, overrides = _flags(arguments, ("--json",), ())
    return memory_plan(load_layout(path, overrides, (check_critic,)), "--json" in flags)


def _flags(
    arguments: list[str], alone: Sequence[str], valued: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The options of a command among `arguments`, those that stand alone and those with a value,
    and the others."""
    flags: dict[str, str] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, assigned, text = argument.partition("=")
        if argument in alone:
            flags[argument] = ""
        elif name in valued:
            if not assigned and (not rest or rest[0].startswith("--")):
                raise ConfigError(f"{name} needs a value; the command's --help describes it")
            flags[name] = text if assigned else rest.pop(0)
        else:
            others.append(argument)
    return flags, others


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.lstrip("0") if text.isascii() and text.isdecimal() else ""
    if not digits or len(digits) > len(str(MAX_RANKS)) or int(digits) > MAX_RANKS:
        raise ConfigError(f"{name} {shortened(text)}: expected a number from 1 to {MAX_RANKS}")
    return int(digits)


def _load(path: str, overrides: list[str]) -> Config:
    return load_config(path, overrides, [_engine_args])


def _engine_args(config: Config) -> list[Violation]:
    name = "rollout.engine_args"
    return [Violation(text, (name,)) for text in violations(config.rollout.engine_args)]


def _reward_function(config: Config) -> list[Violation]:
    """Loads a user's own reward, as a run does before its engines start."""
    function = config.reward.function
    if config.reward.kind != "function" or not Path(function.rpartition(":")[0]).is_file():
        return []  # the latter is told by `config/`
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the settings
            load_function(function)
    except RewardError as error:
        return [Violation(str(error), ("reward.function",))]
    return []


def _matching(name: str) -> list[SettingGroup]:
    """The setting `name` in its group, or the group `name` with the groups inside it."""
    name = name.removeprefix("--")
    groups = setting_groups()
    inside = [group for group in groups if f"{group.name}.".startswith(f"{name}.")]
    if inside:
        return inside
    for group in groups:
        for setting in group.settings:
            if setting.name == name:
                return [SettingGroup(group.name, group.doc, (setting,))]
    nearest = nearest_name(name)
    hint = f"the nearest is {nearest}" if nearest else "`megarl help` lists all"
    raise ConfigError(f"{name} is no setting and no group of settings; {hint}")


def _reference(groups: Sequence[SettingGroup]) -> str:
    lines: list[str] = []
    for group in groups:
        lines += [f"[{group.name}]  {group.doc}", ""]
        for setting in group.settings:
            lines.append(f"  --{setting.name}  {_takes(setting)}")
            lines += textwrap.wrap(
                setting.doc, WIDTH - 6, initial_indent="      ", subsequent_indent="      "
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def _takes(setting: Setting) -> str:
    if setting.required:
        return f"{setting.values}; required"
    return f"{setting.values}; default {toml_value(setting.default)}"


def _complain(violations: Sequence[str]) -> None:
    if len(violations) == 1:
        print(f"megarl: {violations[0]}", file=sys.stderr)
        return
    print(f"megarl: {len(violations)} things keep this from running:", file=sys.stderr)
    for violation in violations:
        print(f"  - {violation}", file=sys.stderr)
