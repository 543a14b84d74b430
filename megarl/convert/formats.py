"""The format of a checkpoint, found by what is in its folder. Reads names and small text only."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl import run_paths
from megarl.actor.config_fields import read_json
from megarl.errors import CheckpointError
from megarl.reshard.files import INDEX, SINGLE

Format = Literal["hf", "torch_dist"]
FORMATS: dict[Format, str] = {"hf": "Hugging Face", "torch_dist": "Megatron torch_dist"}

METADATA = ".metadata"  # torch's own list of what is stored where
BACKEND = "metadata.json"  # Megatron's word for the format, written last
CONFIG = "config.json"
LATEST = "latest_checkpointed_iteration.txt"  # Megatron-LM's, beside its iterations
COMPLETE = "COMPLETE"  # of a whole checkpoint of a run
RECORD = "conversion.json"  # how a folder was made by `megarl convert`, or is being made

MAX_NAME = 200  # characters of an iteration's name

_OLDER = re.compile(r"mp_rank_\d+")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's tensors are in `path`; `model` is the folder of its config.json, if known."""

    format: Format
    path: Path
    model: Path | None

    @property
    def words(self) -> str:
        """The format in words."""
        return FORMATS[self.format]


def find(path: str | Path, model: str | Path | None = None) -> Found:
    """The checkpoint in a folder: of Hugging Face, of Megatron, or of a run of megarl.

    `model` is a folder with the config.json of a Megatron checkpoint that has none beside it; one
    of a run is known by the run's settings. Raises CheckpointError where there is no checkpoint,
    one that is not whole, or one in a format that is not read.
    """
    folder = Path(path)
    given = None if model is None else Path(model)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {found}; name the folder of a checkpoint")
    if read_json(folder / RECORD, required=False).get("finished") is False:
        raise CheckpointError(
            f"{folder} is a conversion that has not ended; give its megarl convert again, which "
            "goes on with it"
        )
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return Found("hf", folder, folder)
    if (folder / "megatron" / BACKEND).is_file():
        return _of_run(folder, given)
    if (folder / LATEST).is_file():
        return find(_newest_iteration(folder), given)
    if (folder / METADATA).is_file() or (folder / BACKEND).is_file():
        return _megatron(folder, given)
    raise _refusal(folder)


def _refusal(folder: Path) -> CheckpointError:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(_OLDER.match(name) for name in names):
        return CheckpointError(
            f"{folder} has Megatron's older format (folders mp_rank_*), cut for one layout and "
            "pickled; load it in Megatron-LM at that layout with --ckpt-format torch, and save it "
            "with --ckpt-convert-format torch_dist --ckpt-convert-save NEW_FOLDER"
        )
    newest = _newest_of_run(folder)
    if newest is not None:
        return CheckpointError(
            f"{folder} is no checkpoint, but has some of a run; name one of them, such as {newest}"
        )
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return CheckpointError(
        f"{folder} has no checkpoint that is read: neither {SINGLE} nor {INDEX} (Hugging Face), "
        f"nor {METADATA} and {BACKEND} (Megatron torch_dist); it has {shown or 'nothing'}"
    )


def _newest_of_run(folder: Path) -> Path | None:
    """Of a run's folder, or of its folder of checkpoints, the newest whole one."""
    for parent in (folder / run_paths.CHECKPOINTS, folder):
        found = [at.parent for at in parent.glob(f"*/{COMPLETE}")]
        versions = [each for each in found if run_paths.is_version(each)]
        if versions:
            return max(versions, key=lambda each: int(each.name[1:]))
    return None


def _megatron(folder: Path, model: Path | None) -> Found:
    for name in (BACKEND, METADATA):  # the former is written last
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}: its save has not ended; use an older checkpoint"
            )
    backend = read_json(folder / BACKEND, required=True).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder / BACKEND}: its format is {backend!r}, only 'torch_dist' is read; load it in "
            "Megatron and save it with --ckpt-format torch_dist"
        )
    if model is None and (folder / CONFIG).is_file():
        model = folder
    return Found("torch_dist", folder, model)


def _of_run(folder: Path, model: Path | None) -> Found:
    """RUN/checkpoints/v000012: the learner's part, of the model that the run's settings name."""
    if not (folder / COMPLETE).is_file():
        raise CheckpointError(f"{folder} has no {COMPLETE}: its save has not ended; use another")
    settings = folder.parent.parent / run_paths.SETTINGS
    if model is None and settings.is_file():
        try:
            named = tomllib.loads(settings.read_text(encoding="utf-8"))["actor"]["model"]
            model = settings.parent / named
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{settings} does not say which model the run has ({error}); name its folder with "
                "--model"
            ) from error
    return _megatron(folder / "megatron", model)


def _newest_iteration(folder: Path) -> Path:
    with (folder / LATEST).open(encoding="utf-8", errors="replace") as file:
        text = file.read(MAX_NAME).strip()
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdecimal() else text
    iteration = folder / name
    is_inside = name not in ("", "..") and Path(name).name == name
    if not (is_inside and iteration.is_dir()) or (iteration / LATEST).is_file():
        raise CheckpointError(
            f"{folder / LATEST} names {text[:80]!r}, and {folder} has no such iteration; name the "
            "folder of one"
        )
    return iteration
