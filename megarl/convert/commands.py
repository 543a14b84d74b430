"""Commands on checkpoints: their arguments, what they print, their exit status."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.convert.formats import FORMATS, find
from megarl.errors import ConfigError, MegarlError, in_words

INSPECT = """\
megarl inspect CKPT [--model FOLDER] [--json]        what is in a checkpoint; no weight is read

CKPT is a folder: a Hugging Face checkpoint (safetensors), a Megatron one (torch_dist), or one of a
run of megarl (RUN/checkpoints/v000012). The exit status is 1 where it is not whole, or not of the
model that its config.json describes, 2 where it is broken or there is none.

  --model FOLDER        Hugging Face folder with the config.json of a Megatron checkpoint
  --json                one JSON object instead of a page
"""

COMPARE = """\
megarl compare A B [--model FOLDER] [--json]         compare two checkpoints of any formats

Names, shapes, types of numbers, and every element; the exit status is 0 where all are equal, 1
where something differs, 2 where it could not be found out. Tensors go by their Hugging Face names.
Float8 against another type is compared as the numbers in bfloat16 that it stands for.

  --model FOLDER        Hugging Face folder with the config.json of a Megatron checkpoint
  --json                one JSON object instead of a page
"""

CONVERT = """\
megarl convert SRC DST [options]                     make a checkpoint of another format or type

A Hugging Face folder becomes a Megatron one (torch_dist), and the other way round; with --to also
one of the same format. No GPU and no engine is needed, and little memory, whatever the model. DST
is there when it is whole; a conversion that was killed goes on when the same command is given
again. Nothing is overwritten. The exit status is 0 where DST is written, else 2.

  --to FORMAT           hf or torch_dist; default the one that SRC has not
  --dtype TYPE          bf16, fp16 or fp32, of all weights but the router's bias, or fp8 (to hf):
                        float8 in blocks of 128 x 128; default as they are, but float8 as bf16 in
                        torch_dist; the optimizer's state stays what it is
  --model FOLDER        Hugging Face folder with the config.json of a Megatron checkpoint
  --shard-gb N          gigabytes of one file at most, default 5
  --workers N           processes that write, each a file at a time; default one for each processor,
                        at most 4
  --no-optimizer        from torch_dist to torch_dist: leave out the optimizer's state and whatever
                        else is beside the weights; on the way to hf it always is left out
  --digests FILE        check the files of weights of SRC first, against a list as sha256sum writes
  --dry-run             print files, sizes and time, and write nothing; SRC may have a config.json
                        alone, and stands for a checkpoint of that model; no digest is checked
"""

HELP: Mapping[str, str] = {"inspect": INSPECT, "compare": COMPARE, "convert": CONVERT}
OPTIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "inspect": (("--json",), ("--model",)),
    "compare": (("--json",), ("--model",)),
    "convert": (
        ("--dry-run", "--no-optimizer"),
        ("--to", "--dtype", "--model", "--shard-gb", "--workers", "--digests"),
    ),
}
"""Of each command: its flags that stand alone, and those with a value."""

MAX_WORKERS = 4  # by default: more wait for the disk


def run(command: str, paths: Sequence[str], flags: Mapping[str, str]) -> tuple[int, str]:
    """(exit status, text) of a command.

    Raises ConfigError, whose status is 2, where a checkpoint cannot be read or written.
    """
    for path in paths:
        if path.startswith("-"):
            raise ConfigError(f"{path} is no option of megarl {command}; --help lists them")
    usage, words = _USAGE[command]
    if len(paths) != len(usage.split()):
        raise ConfigError(f"megarl {command} takes {words}: megarl {command} {usage}")
    try:
        return _COMMANDS[command](paths, flags)
    except ConfigError:
        raise
    except (MegarlError, OSError) as error:
        raise ConfigError(in_words(error)) from error


def _inspect(paths: Sequence[str], flags: Mapping[str, str]) -> tuple[int, str]:
    from megarl.convert.inspect import inspect, page

    contents = inspect(find(paths[0], flags.get("--model")))
    text = json.dumps(contents.to_dict()) + "\n" if "--json" in flags else page(contents)
    return int(bool(contents.problem)), text


def _compare(paths: Sequence[str], flags: Mapping[str, str]) -> tuple[int, str]:
    from megarl.convert.compare import compare
    from megarl.convert.differences import page, to_dict

    left, right = (find(path, flags.get("--model")) for path in paths)
    found = compare(left, right)
    text = json.dumps(to_dict(found)) + "\n" if "--json" in flags else page(found, left, right)
    return int(not found.is_equal), text


def _convert(paths: Sequence[str], flags: Mapping[str, str]) -> tuple[int, str]:
    from megarl.convert.convert import Options, convert, describe, prepare
    from megarl.convert.journal import unfinished

    processors = len(os.sched_getaffinity(0))
    options = Options(
        to=_one_of("--to", flags, FORMATS),
        dtype=_one_of("--dtype", flags, ("bf16", "fp16", "fp32", "fp8")),
        model=Path(flags["--model"]) if "--model" in flags else None,
        file_bytes=int(min(1e9 * _positive("--shard-gb", flags, 5.0), sys.maxsize)),
        digests=Path(flags["--digests"]) if "--digests" in flags else None,
        optimizer="--no-optimizer" not in flags,
        workers=int(_positive("--workers", flags, float(min(MAX_WORKERS, processors)), least=1.0)),
    )
    source, final = paths[0], Path(os.path.abspath(paths[1]))
    is_dry = "--dry-run" in flags
    work = prepare(source, options, is_dry)
    if is_dry:
        return 0, describe(work, final)
    try:
        return 0, convert(work, final)
    except KeyboardInterrupt:
        if unfinished(final).is_dir():
            sys.stderr.write(f"{unfinished(final)} is kept: the same command goes on with it\n")
        raise


def _one_of(name: str, flags: Mapping[str, str], known: Collection[Any]) -> Any:
    if name in flags and flags[name] not in known:
        raise ConfigError(f"{name} {flags[name]!r}: use one of {', '.join(known)}")
    return flags.get(name)


def _positive(name: str, flags: Mapping[str, str], default: float, least: float = 1e-9) -> float:
    if name not in flags:
        return default
    try:
        value = float(flags[name])
    except ValueError:
        value = 0.0
    if not least <= value < math.inf:
        raise ConfigError(f"{name} {flags[name]!r}: expected a number from {least:g} up")
    return value


_COMMANDS = {"inspect": _inspect, "compare": _compare, "convert": _convert}
_USAGE = {
    "inspect": ("CKPT", "one folder"),
    "compare": ("A B", "two folders"),
    "convert": ("SRC DST", "two folders"),
}
