"""The learner's state on one rank, by parts, each on the device or given back and kept for later.

Owns which storages are of which part, their way to host memory and back, and the figures of it.
Knows nothing of servers, nor of when a part should be where. Import it after
`megatron_cpu.install()`.

Tensors stay the same objects: their storages are emptied and filled again, so that parameters, the
buckets' shards, main gradients and the optimizer's shards stay views of Megatron's buffers.
Megatron-Core 0.19.2 does the same with its gradient buffers, and that is used here. Its
`offload_to_cpu` of the optimizer is not: it gives each tensor new memory, so that fp32 shards are
no views of the parameters any more, and a step would change nothing; and its copies are not pinned.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from megarl.errors import LearnerError
from megarl.learner.host_store import HostStore, distinct_storages, identity, synchronize
from megarl.learner.verbs import PARTS, VERBS
from megarl.linux import memory_bytes


class LearnerState:
    """Weights, gradients and optimizer state of this rank. All parts are on the device at first.

    `model` is the `Chunks` of this rank, `optimizer` its ChainedOptimizer. `generation`
    counts how often the weights came back: what was exported of their memory before is stale.
    `beside` is the same pair of a critic. Servers never want its weights, so that they are of the
    part "optimizer", with which they are needed, but for `score`, which needs that part then too.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        device: torch.device,
        beside: tuple[Any, Any] | None = None,
    ) -> None:
        self.generation = 0
        self._model, self._optimizer, self._device = model, optimizer, device
        self._beside = beside
        self._models = [model] if beside is None else [model, beside[0]]
        self._away: set[str] = set()
        self._stores = {"optimizer": HostStore(device), "weights": HostStore(device)}

    def gather_weights(self) -> None:
        """Have every rank hold all of its weights as the last steps made them."""
        for model in self._models:
            model.gather_weights()

    def require(self, verb: str) -> None:
        """Raise LearnerError, naming the parts, where `verb` needs some that are not here."""
        needed = set(VERBS[verb].needs)
        if verb == "score" and self._beside is not None:
            needed.add("optimizer")
        missing = [part for part in PARTS if part in needed & self._away]
        if missing:
            raise LearnerError(
                f"{verb}: the learner's {' and '.join(missing)} {_are(missing)} offloaded; call "
                f"onload({missing}) first"
            )

    def offload(self, parts: Sequence[str]) -> None:
        """Give the device memory of `parts` back. Weights and optimizer are kept in host memory.

        Gradients are dropped: every step begins by clearing them. Raises LearnerError, with nothing
        changed, for a part that is unknown or offloaded already.
        """
        self._check(parts, here=True)
        synchronize(self._device)
        for part in parts:
            if part == "gradients":
                with _quiet():
                    for model in self._models:
                        model.offload_grad_buffers()
            else:
                self._stores[part].park(self._storages(part))
            self._away.add(part)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[str]) -> None:
        """Bring `parts` back, bit for bit; gradients are zero.

        Raises LearnerError for a part that is unknown or here, with nothing changed, and where the
        device has no room for it.
        """
        self._check(parts, here=False)
        for part in parts:
            try:
                if part == "gradients":
                    with _quiet():
                        for model in self._models:
                            model.restore_grad_buffers()
                else:
                    self._stores[part].unpark()
            except torch.OutOfMemoryError as error:
                raise LearnerError(
                    f"onload: the learner's {part} do not fit on the device beside what is there: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            self._away.discard(part)
            self.generation += part == "weights"

    def num_bytes(self, parts: Sequence[str] = PARTS) -> int:
        """What `parts` have on the device of this rank."""
        return sum(storage.nbytes() for part in parts for storage in self._storages(part))

    def figures(self) -> dict[str, int]:
        """Bytes, of the rank that has most of each. Collective over all ranks.

        `learner_state`: what its three parts have on the device. `learner_parked`: host memory that
        parts are kept in. On a GPU `learner_allocated`, `learner_reserved`: of torch's allocator;
        `device_used`: by all processes; `device_rest`: used without what this rank reserves:
        servers, CUDA contexts, communicators. On a CPU `learner_rss`: of the process. Each name
        ends in `_bytes`.
        """
        is_gpu = self._device.type == "cuda"
        found = {
            "learner_state_bytes": self.num_bytes(),
            "learner_parked_bytes": sum(store.num_bytes for store in self._stores.values()),
            **(_of_gpu(self._device) if is_gpu else {"learner_rss_bytes": memory_bytes()[0]}),
        }
        values = torch.tensor(list(found.values()), dtype=torch.int64, device=self._device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return dict(zip(found, map(int, values.tolist()), strict=True))

    def _check(self, parts: Sequence[str], here: bool) -> None:
        verb = "offload" if here else "onload"
        unknown = [part for part in parts if part not in PARTS]
        if unknown or len(set(parts)) != len(parts):
            raise LearnerError(f"{verb}: {list(parts)} are not parts, each once, of {list(PARTS)}")
        wrong = [part for part in parts if (part in self._away) == here]
        if wrong:
            state = "offloaded" if here else "on the device"
            raise LearnerError(
                f"{verb}: the learner's {' and '.join(wrong)} {_are(wrong)} {state} already; "
                "the caller has lost track"
            )

    def _storages(self, part: str) -> Iterator[UntypedStorage]:
        """Each storage of `part` once. fp32 shards of the optimizer are views of the weights."""
        if part == "gradients":
            buffers = [(*m.buffers, *m.expert_parallel_buffers) for m in self._models]
            return distinct_storages(buffer.grad_data for each in buffers for buffer in each)
        weights = list(self._model.parameters())
        if part == "weights":
            return distinct_storages(weights)
        known = {identity(weight.untyped_storage()) for weight in weights}
        tensors = [_optimizer_tensors(self._optimizer)]
        if self._beside is not None:
            model, optimizer = self._beside
            tensors += [model.parameters(), _optimizer_tensors(optimizer)]
        storages = distinct_storages(itertools.chain.from_iterable(tensors))
        return (
            storage
            for storage in storages
            if identity(storage) not in known and storage.device.type == self._device.type
        )


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Masters and moments of every inner optimizer of a ChainedOptimizer."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                state = part.optimizer.state.get(parameter, {})
                yield from (value for value in state.values() if torch.is_tensor(value))


def _of_gpu(device: torch.device) -> dict[str, int]:
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return {
        "learner_allocated_bytes": torch.cuda.memory_allocated(device),
        "learner_reserved_bytes": reserved,
        "device_used_bytes": total - free,
        "device_rest_bytes": total - free - reserved,
    }


def _are(parts: Sequence[str]) -> str:
    return "is" if list(parts) == ["optimizer"] else "are"


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron's use of torch's deprecated kind of storage is not for the log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
