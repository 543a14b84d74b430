"""Peak memory of log-probs, entropy and their gradient, in a process of its own.

    python -m benchmarks.training.peak megarl|naive --tokens 2048 --vocabulary 151936

Prints one JSON object. `naive` is what a loss in plain torch does: logits in fp32, divided by the
temperature, log-softmax, entropy, gather. Both run on the same positions of the same hidden states.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, TEMPERATURE = 8, 0.9  # a product of few columns: it is memory that is measured


class OutputLayer:
    """What `predict` needs of Megatron's output layer, on one rank."""

    sequence_parallel = False

    def __init__(self, weight: Tensor) -> None:
        self.output_size_per_partition = len(weight)

    def __call__(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        """(logits, no bias)."""
        return F.linear(hidden, weight), None


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy through the full log-softmax in fp32."""
    logits = F.linear(hidden, weight).float() / TEMPERATURE
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def of_megarl(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The learner's."""
    from megarl.learner.head import Predictions, predict

    everywhere = torch.ones(len(targets), dtype=torch.bool)
    meaning: dict[str, Any] = {"temperature": TEMPERATURE, "vocab_size": len(weight)}
    asked = Predictions.where(
        everywhere, targets, torch.device("cpu"), **meaning, tp_rank=0, tp_group=None
    )
    found = predict(
        hidden_states=hidden[:, None],
        output_layer=OutputLayer(weight),
        output_weight=weight,
        context=asked,
        scale_logits=lambda logits: logits,
    )
    return found["logp"], found["entropy"]


def resident(key: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at most since `forget_peak`."""
    line = next(
        row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key)
    )
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Have VmHWM start anew."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Measure one way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("megarl", "naive"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    weight = torch.randn(options.vocabulary, HIDDEN, generator=generator).to(dtype)
    hidden = torch.randn(options.tokens, HIDDEN, generator=generator).to(dtype)
    for leaf in (weight, hidden):
        leaf.requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,), generator=generator)
    way = naive if options.way == "naive" else of_megarl
    _once(way, hidden[:8], weight, targets[:8])  # what is imported and allocated once
    before = resident("VmRSS")
    forget_peak()
    logp, entropy, grad = _once(way, hidden, weight, targets)
    peak = resident("VmHWM") - before
    sums = {"logp": float(logp.sum()), "entropy": float(entropy.sum()), "grad": float(grad.norm())}
    print(json.dumps({"peak_bytes": peak, **sums}))


def _once(way: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    logp, entropy = way(hidden, weight, targets)
    (logp.sum() + 0.01 * entropy.sum()).backward()
    assert weight.grad is not None
    grad = weight.grad
    weight.grad = None
    return logp.detach(), entropy.detach(), grad


if __name__ == "__main__":
    main()
