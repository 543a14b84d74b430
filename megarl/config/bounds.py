"""How far log-probs of two engines with equal weights may be apart.

Shared by the parity gate and the probe of each weight sync. Knows nothing of either.
"""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.config.served import served_block

FP32_BOUND = 1e-4  # nats, mean; two fp32 engines were seen to differ by 2e-7 to 8e-6
LEAST_BF16_BOUND = 0.05  # nats, mean; 1e-2 to 3e-2 was seen between correct bf16 engines


PROBE_CONTEXT = 8  # tokens of a probe before those that are scored
PROBE_BF16_BOUND = 0.25  # nats, mean; 0.07 was seen between the two engines on SmolLM2-135M
PROBE_FP8_BOUND = 0.5  # nats, likewise, where a side computes with float8


def probe_bound(config: Config) -> float:
    """The largest mean difference that the probe of a weight sync allows, in nats."""
    if config.parity.max_mean_abs_logprob > 0:
        return config.parity.max_mean_abs_logprob
    if served_block(config) or config.learner.precision.uses_fp8:
        return PROBE_FP8_BOUND
    return FP32_BOUND if config.learner.precision.params == "fp32" else PROBE_BF16_BOUND


def mean_difference_bound(config: Config, baseline: float | None = None) -> float:
    """The largest mean difference allowed, in nats; `baseline` is what equal weights showed."""
    if config.parity.max_mean_abs_logprob > 0:
        return config.parity.max_mean_abs_logprob
    if served_block(config):
        return PROBE_FP8_BOUND
    if config.learner.precision.params == "fp32":
        return FP32_BOUND
    return max(LEAST_BF16_BOUND, 2 * (baseline or 0.0))
