"""How far FP8 may be from bf16 on one golden batch, and what is said of it.

Owns the figures of `megarl check fp8`, their bounds and the verdict; docs/fp8.md has the protocol
and where the bounds come from. Computes nothing of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LOSS_BOUND = 0.05  # of the loss in bf16, relative
COSINE_BOUND = 0.7  # of each layer's gradient with that in bf16
WHOLE_COSINE_BOUND = 0.9  # of the whole gradient
LENGTH_BOUND = 0.25  # by how much a layer's gradient may be longer or shorter, relative
LOGPROB_BOUND = 0.25  # nats, mean absolute difference of a token's log-prob
MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Likeness:
    """Sums over the elements of a gradient in two precisions: of products, and of squares."""

    product: float
    bf16_square: float
    fp8_square: float

    @property
    def cosine(self) -> float:
        """1 where both point the same way; also where both are zero.

        >>> Likeness(3.0, 9.0, 1.0).cosine
        1.0
        """
        lengths = math.sqrt(self.bf16_square * self.fp8_square)
        if lengths == 0:
            return 1.0 if self.bf16_square == self.fp8_square else 0.0
        return self.product / lengths

    @property
    def length(self) -> float:
        """The length in FP8, in lengths in bf16."""
        if self.bf16_square == 0:
            return 1.0 if self.fp8_square == 0 else math.inf
        return math.sqrt(self.fp8_square / self.bf16_square)

    def __add__(self, other: Likeness) -> Likeness:
        return Likeness(
            self.product + other.product,
            self.bf16_square + other.bf16_square,
            self.fp8_square + other.fp8_square,
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one golden batch showed. Losses and log-probs in nats, over `num_tokens` loss tokens.

    `gradients` are by layer: embedding, output layer and last norm under their own names.
    `rollout_*` is the mean absolute difference to the rollout engine's log-probs, None where the
    batch has none.
    """

    num_tokens: int
    bf16_loss: float
    fp8_loss: float
    gradients: Mapping[str, Likeness]
    mean_abs_logprob: float
    max_abs_logprob: float
    rollout_bf16: float | None
    rollout_fp8: float | None
    emulated: bool

    @property
    def whole(self) -> Likeness:
        """Of the whole gradient."""
        return sum(self.gradients.values(), start=Likeness(0.0, 0.0, 0.0))


def comparison_of(values: Mapping[str, object]) -> Comparison:
    """A comparison from the object that `dataclasses.asdict` makes of it."""
    gradients = values["gradients"]
    assert isinstance(gradients, Mapping)
    named = {name: Likeness(**sums) for name, sums in gradients.items()}
    return Comparison(**{**values, "gradients": named})  # type: ignore[arg-type]


def faults(found: Comparison) -> list[str]:
    """What exceeds its bound, in words; nothing where FP8 may be trained with."""
    wrong = []
    if found.max_abs_logprob == 0:
        wrong.append(
            "FP8: every log-prob is that of bf16 to the last bit, so nothing was computed in FP8"
        )
    lost = abs(found.fp8_loss - found.bf16_loss)
    if not lost <= LOSS_BOUND * abs(found.bf16_loss):
        wrong.append(
            f"loss: {found.fp8_loss:.6g} in FP8, {found.bf16_loss:.6g} in bf16, apart by "
            f"{_share(lost, found.bf16_loss):.2%}; the bound is {LOSS_BOUND:.0%}"
        )
    if not found.whole.cosine >= WHOLE_COSINE_BOUND:
        wrong.append(
            f"gradient: its cosine with that in bf16 is {found.whole.cosine:.4f}; the bound is "
            f"{WHOLE_COSINE_BOUND}"
        )
    turned = [n for n, g in found.gradients.items() if not g.cosine >= COSINE_BOUND]
    wrong += _layers(found, turned, "the cosine of the gradient with that in bf16 is below", "")
    other = [n for n, g in found.gradients.items() if not abs(g.length - 1) <= LENGTH_BOUND]
    wrong += _layers(found, other, "", "the gradient is longer or shorter than in bf16 by over")
    if not found.mean_abs_logprob <= LOGPROB_BOUND:
        wrong.append(
            f"log-probs: {found.mean_abs_logprob:.3g} nats from those in bf16 in the mean; the "
            f"bound is {LOGPROB_BOUND:g}"
        )
    if found.rollout_bf16 is not None and found.rollout_fp8 is not None:
        bound = found.rollout_bf16 + LOGPROB_BOUND
        if not found.rollout_fp8 <= bound:
            wrong.append(
                f"rollout: log-probs in FP8 are {found.rollout_fp8:.3g} nats from the rollout "
                f"engine's in the mean, those in bf16 {found.rollout_bf16:.3g}; the bound is "
                f"{bound:.3g}"
            )
    return wrong


def page(found: Comparison) -> str:
    """All figures, one a line, and the layers as a table."""
    lines = [
        f"loss        bf16 {found.bf16_loss:.6g}, FP8 {found.fp8_loss:.6g} nats a token "
        f"({_share(abs(found.fp8_loss - found.bf16_loss), found.bf16_loss):.3%} apart) over "
        f"{found.num_tokens} tokens",
        f"log-probs   mean {found.mean_abs_logprob:.3g}, largest {found.max_abs_logprob:.3g} nats "
        "between bf16 and FP8",
    ]
    if found.rollout_bf16 is not None and found.rollout_fp8 is not None:
        lines.append(
            f"rollout     mean {found.rollout_bf16:.3g} nats from bf16, {found.rollout_fp8:.3g} "
            "from FP8"
        )
    lines.append(
        f"gradient    cosine {found.whole.cosine:.5f}, length {found.whole.length:.4f} of bf16's"
    )
    width = max(len(name) for name in found.gradients)
    lines += [
        f"  {name:{width}}  cosine {each.cosine:.5f}  length {each.length:.4f}"
        for name, each in found.gradients.items()
    ]
    return "\n".join(lines)


def bounds() -> str:
    """What is compared, and how far apart it may be."""
    return (
        f"loss of the golden batch within {LOSS_BOUND:.0%} of bf16's; the gradient's cosine with "
        f"bf16's {WHOLE_COSINE_BOUND} or more, each layer's {COSINE_BOUND} or more and its length "
        f"within {LENGTH_BOUND:.0%}; log-probs within {LOGPROB_BOUND:g} nats in the mean, and no "
        f"further than that from the rollout engine's beyond what bf16 is"
    )


def _layers(found: Comparison, names: list[str], below: str, beyond: str) -> list[str]:
    if not names:
        return []
    said = ", ".join(
        f"{name} ({found.gradients[name].cosine if below else found.gradients[name].length:.4f})"
        for name in names[:MOST_NAMED]
    )
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    rule = f"{below} {COSINE_BOUND}" if below else f"{beyond} {LENGTH_BOUND:.0%}"
    return [f"layers: {rule} in {said}{more}"]


def _share(part: float, whole: float) -> float:
    return part / abs(whole) if whole else math.inf
