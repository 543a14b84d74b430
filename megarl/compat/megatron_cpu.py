"""Megatron-Core without CUDA: the calls in which it names the CUDA device go to the CPU.

Owns that redirection, and the care that torch's own AdamW needs in Megatron's checkpoints. One
computation of Megatron's is replaced, by an equal one: RoPE of packed sequences without a loop over
them. Inert where CUDA is present. Knows nothing of megarl's learner.

For: megatron-core 0.19.2 (private names are touched, so the version is exact). Ends when
Megatron-Core takes its device from its configuration instead of the literal "cuda".
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _device

from megarl.compat import placeholders
from megarl.compat.megatron_context import context_places

# The torch factories that Megatron calls with device="cuda" or pin_memory=True.
_FACTORIES = ("tensor", "empty", "empty_like", "zeros", "ones", "full", "arange")
_NO_PARAMETER = "no parameter"  # the key of a step in the state of an AdamW without parameters


class _Stream:
    """The CPU's only stream, and its events: all work on it is already done."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _done(self, *args: object, **kwargs: object) -> _Stream:
        return self

    wait_stream = wait_event = record_event = synchronize = wait = record = _done


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """The torch factory `make`, reading device "cuda" as "cpu" and leaving memory unpinned."""

    @functools.wraps(make)
    def make_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return make_on_cpu


def _as_it_is(function: Any = None, **settings: object) -> Any:
    """torch.compile where nothing is compiled: naming Inductor alone costs a second of a core."""
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def _absent(name: str) -> Iterator[None]:
    """While it lasts, importing `name` fails as if it were not installed; not where it is there."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


_true_type = torch.Tensor.type


def _cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor.type, with the names that Megatron's optimizers sort parameters by."""
    name = _true_type(tensor, *args, **kwargs)
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


def is_installed() -> bool:
    """Whether this process runs Megatron-Core on the CPU through this file."""
    return torch.Tensor.type is _cuda_type


def install() -> None:
    """Redirect CUDA to the CPU in this process, once; does nothing where CUDA is present.

    Call it before anything of Megatron-Core is imported.
    """
    if torch.cuda.is_available() or is_installed():
        return
    # torch caches the factories that `with torch.device(...)` acts on at its first use. Were they
    # the wrapped ones, models that Hugging Face builds later would keep uninitialised RoPE tables.
    _device._device_constructors()
    placeholders.install(["triton"])
    _redirect_torch()
    # Megatron's timers can write to wandb: no learner rank does, and it takes half a second.
    with warnings.catch_warnings(), _absent("wandb"):
        warnings.simplefilter("ignore")  # that apex and Transformer Engine are absent is known
        _redirect_megatron()


def _redirect_torch() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda tensor, *args, **kwargs: tensor
    tensor.type = _cuda_type
    torch.compile = _as_it_is  # Megatron decorates its small fusions with it as it is imported
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.current_stream = _Stream
    cuda.stream = contextlib.nullcontext
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = torch.get_rng_state


def _redirect_megatron() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import token_dispatcher

    rotate = rope_utils._apply_rotary_pos_emb_bshd

    def rotate_packed(
        t: Any, cu_seqlens: Any, freqs: Any, *, cp_group: Any, **settings: Any
    ) -> torch.Tensor:
        ranks = cp_group.size()
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff() // ranks)
        positions = context_places(cu_seqlens, ranks, cp_group.rank()) - starts
        rotated: torch.Tensor = rotate(t.unsqueeze(1), freqs[positions], **settings)
        return rotated.squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # torch's AdamW keeps its step beside the moments, where a loaded checkpoint has none.
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states_with_step(self: Any, param: Any, tensors: Mapping[str, Any]) -> Any:
        return set_states(self, param, {"step": None, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step

    # Counts that are on the CPU already would reach all_to_all_single as tensors, not numbers.
    def counts_on_cpu(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = counts_on_cpu

    _divide_unevenly(mappings)

    # Latent attention asks of a projection down whether it is this one, to have it whole.
    from megarl.compat.megatron_parts import WholeLinear

    multi_latent_attention.TELinear = WholeLinear


def _divide_unevenly(mappings: Any) -> None:
    """Have tokens of experts that are cut over ranks gathered and summed, whatever their numbers.

    Gloo has neither all_gather nor reduce_scatter for parts of different sizes.
    """
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(part: Any, group: Any, sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, *args, **kwargs)
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])

    def scatter_parts(whole: Any, group: Any, sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if sizes is None or group.size() == 1:
            return scatter(whole, group, sizes, *args, **kwargs)
        total = whole.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


def init_optimizer_state(optimizer: Any) -> None:
    """Give torch's AdamW the state it has from its first step on. Call before loading one.

    `optimizer` is a Megatron ChainedOptimizer. Nothing to do for other Adams. Call before each save
    too: one without parameters on this rank, as that of experts on a stage of dense layers, has no
    step of its own, and Megatron asks it for one.
    """
    inners = _torch_adamws(optimizer)
    for inner in inners:
        for param in _parameters(inner):
            if not inner.state.get(param):
                zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[param] = {"step": torch.tensor(0.0), **zeros}
    steps = [inner.state[param]["step"] for inner in inners for param in _parameters(inner)]
    for inner in inners:
        if steps and not _parameters(inner):
            inner.state[_NO_PARAMETER] = {"step": steps[0].clone()}


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`, keeping one step counter per parameter.

    After loading, Megatron shares one counter tensor, which torch's AdamW would count up once per
    parameter, so that its bias correction goes wrong without an error.
    """
    optimizer.load_state_dict(state)
    for inner in _torch_adamws(optimizer):
        for param_state in inner.state.values():
            param_state["step"] = param_state["step"].clone()


def _parameters(inner: torch.optim.AdamW) -> list[Any]:
    return [param for group in inner.param_groups for param in group["params"]]


def _torch_adamws(optimizer: Any) -> list[torch.optim.AdamW]:
    inner = (part.optimizer for part in optimizer.chained_optimizers)
    return [each for each in inner if isinstance(each, torch.optim.AdamW)]
