"""Log-probs and entropy against the full softmax, for vocabularies that nothing divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.learner import logprobs
from megarl.learner.logprobs import vocab_parallel_logprobs

ROWS, TEMPERATURE = 37, 0.7


def inputs(vocab_size: int, padded: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits with large numbers in the padding columns, targets, and weights of both outputs."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(ROWS, padded, generator=generator)
    logits[:, vocab_size:] = 50.0
    targets = torch.randint(0, vocab_size, (ROWS,), generator=generator)
    weights = torch.randn(2, ROWS, generator=generator)
    return logits.to(dtype), targets, weights


def expected(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same through torch in float64, and the gradient of the logits."""
    whole = logits.detach().double().requires_grad_()
    logp = (whole[:, :vocab_size] / TEMPERATURE).log_softmax(-1)
    at_target = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (weights[0] * at_target + weights[1] * entropy).sum().backward()
    assert whole.grad is not None
    return at_target.detach(), entropy.detach(), whole.grad


def check(rank: int, ranks: int, vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    logits, targets, weights = inputs(vocab_size, padded, dtype)
    logp, entropy, grad = expected(logits, targets, weights, vocab_size)
    width = padded // ranks
    mine = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    before = mine.detach().clone()
    group = dist.group.WORLD if ranks > 1 else None
    found = vocab_parallel_logprobs(
        mine,
        targets,
        temperature=TEMPERATURE,
        vocab_size=vocab_size,
        tp_rank=rank,
        tp_group=group,
    )
    (weights[0] * found[0] + weights[1] * found[1]).sum().backward()
    torch.testing.assert_close(found[0].double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1].double(), entropy, rtol=0, atol=1e-5)
    assert torch.equal(mine, before), "the logits were changed"
    assert mine.grad is not None
    rounding = 1e-5 if dtype is torch.float32 else 2e-2
    ours = grad[:, rank * width : (rank + 1) * width]
    torch.testing.assert_close(mine.grad.double(), ours, rtol=rounding, atol=1e-6)
    assert not mine.grad[:, max(0, vocab_size - rank * width) :].any(), "padding has a gradient"


def run_rank(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for dtype in (torch.float32, torch.bfloat16):
        check(rank, ranks, vocab_size=101, padded=128, dtype=dtype)
        check(rank, ranks, vocab_size=50, padded=128, dtype=dtype)  # the last rank pads only
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "padded"), [(101, 128), (128, 128), (1, 4)])
def test_logprobs_and_entropy_on_one_rank_are_those_of_the_full_softmax(
    vocab_size: int, padded: int, dtype: torch.dtype
) -> None:
    check(0, 1, vocab_size, padded, dtype)


def test_logprobs_and_entropy_over_two_ranks_are_those_of_the_full_softmax(tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(2, f"file://{tmp_path}/store"), nprocs=2)


def test_logprobs_in_chunks_are_those_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MAX_FP32_ELEMENTS", 500)  # 4 rows of 101 columns
    check(0, 1, vocab_size=101, padded=128, dtype=torch.float32)


class LargestFp32(TorchDispatchMode):
    """Remembers the elements of the largest fp32 tensor that anything makes."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return made


def test_no_fp32_tensor_of_all_logits_is_made_forward_or_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, targets, weights = inputs(101, 128, torch.bfloat16)
    logits.requires_grad_()
    for most in (500, ROWS * 128):
        monkeypatch.setattr(logprobs, "MAX_FP32_ELEMENTS", most)
        with LargestFp32() as seen:
            found = vocab_parallel_logprobs(
                logits, targets, temperature=TEMPERATURE, vocab_size=101
            )
            (weights[0] * found[0] + weights[1] * found[1]).sum().backward()
        assert ROWS < seen.elements <= most


def test_rows_without_a_gradient_get_zeros_even_where_their_logits_are_not_numbers() -> None:
    logits, targets, _ = inputs(101, 128, torch.float32)
    logits[3] = float("nan")
    logits.requires_grad_()
    logp, _ = vocab_parallel_logprobs(logits, targets, temperature=TEMPERATURE, vocab_size=101)
    keep = torch.arange(ROWS) != 3
    torch.where(keep, logp, 0.0).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[3].any()
