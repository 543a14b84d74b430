"""The group file: one finished group's tokens on disk, written by the rollout, read by the learner.

Owns the format, its writer and its reader. Knows numpy and safetensors; nothing of torch, rewards
or advantages (those are the controller's, and travel by reference).

Format (safetensors), G samples, N tokens of all samples together, prompt then response, sample
after sample:
    tokens             int32   [N]
    offsets            int64   [G+1]  sample i is tokens[offsets[i]:offsets[i+1]]
    prompt_lengths     int32   [G]
    loss_mask          uint8   [N]    1 where the loss sees the token; 0 on prompt tokens
    behavior_logprobs  float32 [N]    nats, from the sampling pass; 0 on prompt tokens
    versions           int32   [N]    policy version that made the token; -1 on prompt tokens
    metadata: format, group_id, prompt_id, sample_ids (a JSON list)
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megarl.errors import MALFORMED, DataError, ShapeError
from megarl.types import Group, Sample

FORMAT = "megarl-group-1"
NO_VERSION = -1

_DTYPES = {
    "tokens": np.int32,
    "offsets": np.int64,
    "prompt_lengths": np.int32,
    "loss_mask": np.uint8,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
}


@dataclass(frozen=True, slots=True, eq=False)
class SampleTokens:
    """One row of a group file, T = prompt and response tokens.

    Arrays are views, all of shape [T].
    """

    sample_id: str
    prompt_length: int
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    behavior_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]

    def first(self, num_tokens: int) -> SampleTokens:
        """Its first tokens, no more than `num_tokens`."""
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            loss_mask=self.loss_mask[:num_tokens],
            behavior_logprobs=self.behavior_logprobs[:num_tokens],
            versions=self.versions[:num_tokens],
        )


@dataclass(frozen=True, slots=True, eq=False)
class GroupTokens:
    """A group file in memory. Shapes are those of the module's docstring."""

    group_id: str
    prompt_id: str
    sample_ids: tuple[str, ...]
    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    behavior_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def sample(self, index: int) -> SampleTokens:
        """Row `index`, as views into this group's arrays. Raises IndexError outside [0, G)."""
        if not 0 <= index < len(self):
            raise IndexError(f"group {self.group_id} has {len(self)} samples, not a row {index}")
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return SampleTokens(
            sample_id=self.sample_ids[index],
            prompt_length=int(self.prompt_lengths[index]),
            tokens=self.tokens[part],
            loss_mask=self.loss_mask[part],
            behavior_logprobs=self.behavior_logprobs[part],
            versions=self.versions[part],
        )


def group_arrays(group: Group) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of the format, from a group's samples.

    Raises ShapeError where parts are out of step.
    """
    tokens: list[int] = []
    offsets, prompt_lengths = [0], []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for sample in group.samples:
        num_prompt = len(sample.prompt_ids)
        tokens += [*sample.prompt_ids, *sample.response_ids]
        mask += [0] * num_prompt + [int(seen) for seen in sample.loss_mask]
        logprobs += [0.0] * num_prompt + list(sample.behavior_logprobs)
        versions += [NO_VERSION] * num_prompt + _response_versions(sample)
        offsets.append(len(tokens))
        prompt_lengths.append(num_prompt)
        if not len(tokens) == len(mask) == len(logprobs) == len(versions):
            raise ShapeError(
                f"{sample.sample_id}: {len(sample.response_ids)} response tokens with "
                f"{len(sample.loss_mask)} mask entries, {len(sample.behavior_logprobs)} "
                f"log-probs and version spans {sample.version_spans}; use Sample.extended only"
            )
    values = {
        "tokens": tokens,
        "offsets": offsets,
        "prompt_lengths": prompt_lengths,
        "loss_mask": mask,
        "behavior_logprobs": logprobs,
        "versions": versions,
    }
    return {name: np.asarray(values[name], dtype=dtype) for name, dtype in _DTYPES.items()}


def write_group(directory: str | os.PathLike[str], group: Group) -> str:
    """Write `directory/<group_id>.safetensors` and return its path.

    The file appears whole or not at all, and replaces one of the same name. Raises ShapeError
    where a sample's parts are out of step, DataError where the group id is no file name, OSError
    from the disk.
    """
    if not group.group_id or Path(group.group_id).name != group.group_id:
        raise DataError(f"group id {group.group_id!r} is no file name; use one without a separator")
    metadata = {
        "format": FORMAT,
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "sample_ids": json.dumps([sample.sample_id for sample in group.samples]),
    }
    payload = save(group_arrays(group), metadata=metadata)
    path = Path(directory) / f"{group.group_id}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{group.group_id}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return str(path)


def read_group(path: str | os.PathLike[str]) -> GroupTokens:
    """Read a group file whole. Raises DataError, naming the file, where it is missing or broken."""
    try:
        with safe_open(os.fspath(path), framework="numpy") as stream:
            metadata = stream.metadata() or {}
            names = set(stream.keys())
            missing = sorted(set(_DTYPES) - names)
            if missing or metadata.get("format") != FORMAT:
                raise _broken(path, f"it has tensors {sorted(names)} and metadata {metadata}")
            arrays = {name: stream.get_tensor(name) for name in _DTYPES}
        group = GroupTokens(
            group_id=metadata["group_id"],
            prompt_id=metadata["prompt_id"],
            sample_ids=tuple(json.loads(metadata["sample_ids"])),
            **arrays,
        )
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: there is no such group file; was its run folder moved?"
        ) from error
    except (SafetensorError, OSError, *MALFORMED) as error:
        raise _broken(path, str(error)) from error
    _check(path, group)
    return group


def _response_versions(sample: Sample) -> list[int]:
    versions: list[int] = []
    for span in sample.version_spans:
        if span.start != len(versions):
            raise ShapeError(
                f"{sample.sample_id}: version spans {sample.version_spans} leave a gap or "
                f"overlap at response token {len(versions)}; use Sample.extended only"
            )
        versions += [span.version] * (span.end - span.start)
    return versions


def _check(path: str | os.PathLike[str], group: GroupTokens) -> None:
    for name, dtype in _DTYPES.items():
        array = getattr(group, name)
        if array.dtype != dtype or array.ndim != 1:
            raise _broken(path, f"{name} is {array.dtype} {list(array.shape)}")
    num_samples, num_tokens = len(group), len(group.tokens)
    for name in ("loss_mask", "behavior_logprobs", "versions"):
        if len(getattr(group, name)) != num_tokens:
            raise _broken(path, f"{name} has {len(getattr(group, name))} of {num_tokens} tokens")
    lengths = np.diff(group.offsets)
    if (
        len(group.offsets) != num_samples + 1
        or len(group.prompt_lengths) != num_samples
        or int(group.offsets[0]) != 0
        or int(group.offsets[-1]) != num_tokens
        or bool((lengths < group.prompt_lengths).any())
        or bool((group.prompt_lengths < 0).any())
    ):
        raise _broken(path, f"offsets or prompt lengths do not fit {num_samples} samples")


def _broken(path: str | os.PathLike[str], found: str) -> DataError:
    return DataError(
        f"{path}: not a whole group file: {found}; delete its version's folder and rerun"
    )
