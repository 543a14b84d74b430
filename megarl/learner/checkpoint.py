"""The learner's part of a checkpoint: weights, optimizer and random state, in any layout.

Owns what is in the folder and that it is whole or absent. Reading and writing are Megatron's
distributed checkpointing; when files are written is `saving`'s. Knows nothing of prompts, of which
checkpoints stay, or of the reference, which is always `actor.model`. Import it after
`megatron_cpu.install()`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import CheckpointException

from megarl.actor.shape import ModelShape
from megarl.compat.megatron_checkpoint import Prepared, content, keep_settings, prepare
from megarl.compat.megatron_cpu import init_optimizer_state, load_optimizer_state
from megarl.compat.megatron_optimizer_state import copied_once
from megarl.errors import CheckpointError
from megarl.learner.chunks import Chunks
from megarl.learner.distributed import Ranks
from megarl.learner.filesums import damage as file_damage
from megarl.learner.filesums import digests, file_digest, write_digests
from megarl.learner.optimizer import Optimizer

PARTIAL = ".partial"
FORMAT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """What a checkpoint is of, on this rank."""

    model: Chunks
    optimizer: Optimizer
    ranks: Ranks
    shape: ModelShape


class Writing:
    """A checkpoint on its way to the folder `path`, whose numbers this rank has copied.

    It is written beside `path` and renamed, so that `path` is never there in part. All ranks reach
    it. `begin` makes one.
    """

    def __init__(self, path: Path, partial: Path, prepared: Prepared) -> None:
        self.path = path
        self._partial, self._prepared = partial, prepared
        self._written: list[Any] = []
        self._digests: dict[str, str] = {}

    def write(self) -> None:
        """Write this rank's files. Not collective, and for any thread. Raises CheckpointError."""
        try:
            self._written = self._prepared.write()
            names = self._prepared.names
            self._digests = {name: file_digest(self._partial / name) for name in names}
        except (OSError, RuntimeError) as error:  # the latter is torch's, for its own writer
            raise _cannot_write(self._partial, error) from error

    def finish(self) -> None:
        """Make the files a checkpoint, once every rank has written its own.

        Collective over all ranks. Raises CheckpointError, on every rank.
        """
        written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(written, self._written)
        _on_rank_0(lambda: self._prepared.finish(written), self._partial)
        found = digests(self._partial, self._digests)
        _on_rank_0(lambda: write_digests(self._partial, found), self._partial)
        _on_rank_0(lambda: _replace(self._partial, self.path), self._partial)

    def abandon(self) -> None:
        """Remove what is written of it. Not collective; one rank does it for all."""
        shutil.rmtree(self._partial, ignore_errors=True)


def begin(training: Training, path: Path, version: int) -> Writing:
    """Copy everything that training goes on from as policy `version`, to be written to `path`.

    Collective over all ranks; training may go on when it returns. Raises CheckpointError, on every
    rank, where the folder cannot be made.
    """
    partial = path.with_name(path.name + PARTIAL)
    init_optimizer_state(training.optimizer.megatron)
    _on_rank_0(lambda: _make_empty(partial), partial)
    with copied_once():
        state = _sharded_state(training, is_loading=False)
    state["common"] = {
        "format": FORMAT,
        "version": version,
        "schedule": training.optimizer.state_dict(),
        "mesh": asdict(training.ranks.mesh),
        "shape": asdict(training.shape),
    }
    state["rng"] = _rng(training.ranks, _rng_states())
    model = training.model
    live = [*model.parameters(), *(tensor for _, tensor in model.named_buffers())]
    with _told_as_checkpoint_error(partial, "cannot be written; look at the space left there"):
        return Writing(path, partial, prepare(state, partial, live))


def load(training: Training, path: Path, is_checked: bool = False) -> int:
    """Continue from what was saved to `path`, in any layout; returns its policy version.

    Collective over all ranks. Settings of the optimizer stay those of this run; its moments and
    steps are restored. Random states are restored where the mesh is the same, else they stay as
    seeded. Raises CheckpointError where the folder is missing, broken, or of another model; a file
    that is not as it was saved is noticed before anything is loaded, unless `is_checked` says that
    `damage` was called already.
    """
    if not is_checked and (found := damage(path)):
        raise CheckpointError(f"{found}; continue from an older one")
    init_optimizer_state(training.optimizer.megatron)
    advice = "cannot be read; remove its folder to continue from an older one"
    with _told_as_checkpoint_error(path, advice):
        common = dist_checkpointing.load_common_state_dict(str(path))["common"]
    _check(training.shape, path, common)
    state = _sharded_state(training, is_loading=True)
    same_mesh = common["mesh"] == asdict(training.ranks.mesh)
    if same_mesh:
        state["rng"] = _rng(training.ranks, None)
    strict = StrictHandling.RAISE_ALL if same_mesh else StrictHandling.RAISE_UNEXPECTED
    with _told_as_checkpoint_error(path, advice):
        loaded = dist_checkpointing.load(state, str(path), strict=strict)
    training.model.load_state_dict(loaded["model"])
    keep_settings(training.optimizer.megatron, loaded["optimizer"])
    load_optimizer_state(training.optimizer.megatron, loaded["optimizer"])
    training.optimizer.load_state_dict(common["schedule"])
    if same_mesh:
        _set_rng_states(loaded["rng"])
    return int(common["version"])


def damage(path: Path) -> str:
    """How files are not as they were saved, the same on every rank; "" where they are.

    Collective over all ranks.
    """
    if not (path / "metadata.json").is_file():
        return f"{path}: no learner checkpoint there"
    return file_damage(path)


def _sharded_state(training: Training, is_loading: bool) -> dict[str, Any]:
    """Megatron's description of which part of each global tensor this rank holds."""
    model = training.model.sharded_state_dict(content())
    optimizer = training.optimizer.megatron.sharded_state_dict(
        model, is_loading=is_loading, metadata=content()
    )
    return {"model": model, "optimizer": optimizer}


def _check(shape: ModelShape, path: Path, common: dict[str, Any]) -> None:
    if common["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: its format is {common['format']}, this megarl reads {FORMAT}; "
            "continue with the megarl that wrote it"
        )
    ours, theirs = asdict(shape), common["shape"]
    differing = sorted(name for name in ours if ours[name] != theirs.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{path}: it is of a model with {name}={theirs.get(name)}, this one has {ours[name]}; "
            "use the actor.model and critic.model that this run began with, or another run.name"
        )


def _rng(ranks: Ranks, states: dict[str, Any] | None) -> ShardedObject:
    """Random states as one object per (pp, tp) rank; replicas have equal ones."""
    mesh = ranks.mesh
    return ShardedObject(
        "rng", states, (mesh.pp, mesh.tp), (ranks.pp_rank, ranks.tp_rank), replica_id=ranks.replica
    )


def _rng_states() -> dict[str, Any]:
    states = {
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def _told_as_checkpoint_error(path: Path, advice: str) -> Iterator[None]:
    """Errors of files and formats become CheckpointError; torch's is not even an Exception."""
    try:
        yield
    except (CheckpointException, CheckpointingException, OSError, KeyError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            cause = min(error.failures.items())[1][0]  # by rank: (exception, trace)
        reason = str(cause).strip().splitlines() or [""]
        raise CheckpointError(f"{path}: {advice} ({type(cause).__name__}: {reason[0]})") from error


def _on_rank_0(work: Callable[[], None], path: Path) -> None:
    """`work()` on rank 0 while the others wait; its failure is a CheckpointError on every rank."""
    told: list[str] = [""]
    if dist.get_rank() == 0:
        try:
            work()
        except (OSError, RuntimeError) as error:
            told = [str(_cannot_write(path, error))]
    dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise CheckpointError(told[0])


def _cannot_write(path: Path, error: BaseException) -> CheckpointError:
    """What to tell of an error of a disk, which torch's writer covers with one of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) else str(error).partition("\n")[0]
    return CheckpointError(f"{path}: cannot be written ({reason}); look at space and rights there")


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _replace(partial: Path, path: Path) -> None:
    """Put `partial` in the place of `path`. An older `path` is out of the way before that."""
    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        os.rename(partial, path)
        shutil.rmtree(old)
    else:
        os.rename(partial, path)
