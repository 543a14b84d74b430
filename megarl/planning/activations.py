"""Bytes that one decoder layer keeps of its forward pass for its backward pass, on one rank.

Owns the formula, tensor by tensor, and what recomputation takes from it. Knows nothing of weights,
pipelines or settings but `learner.recompute`.

Source: Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models),
section 4, for which tensors a layer keeps, and how tensor and sequence parallelism cut them. What
is different here: no dropout; attention that does not keep its scores (Dao et al. 2022, 3.1);
grouped or latent queries, keys and values; RMSNorm; a gated MLP; routed experts, of which ranks
have as many tokens each. The tests compare it with what autograd saves.

T tokens of this rank's microbatch, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.actor.model_shape import LatentAttention, MixtureOfExperts, ModelShape

FP32 = 4  # bytes; of a norm's or an attention row's statistic, and of the router's scores
INDEX = 8  # bytes of a position: int64


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a layer's tensors are cut by, and how they are computed.

    `sequence` is `tp` with sequence parallelism, else 1; `cp` are context ranks. `fused`: gate and
    up go through one function (bias_activation_fusion). `local`: without Transformer Engine, whose
    attention and rope keep less.
    """

    tp: int = 1
    sequence: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    fused: bool = False
    local: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What one layer keeps, in bytes, by what would compute it again.

    `stream`: the inputs of attention and MLP. `norms`: outputs of norms that are no part of a
    linear. `attention`: all before queries, keys and values, and attention's output. `heads`:
    queries, keys and values, and what a latent attention's projections up begin with; `core`: what
    attention keeps besides them. `mlp`: of a dense MLP, its norm too. `router`: scores and places;
    `dispatched`: tokens as experts take them; `expanded`: their gates and ups; `activated`: the
    products. `shared`: of shared experts.

    `core_begins` is what attention begins with that is kept only where it is computed again.
    `moe_passing` and `passing` are kept by nothing: what experts have besides while they run, and
    any part of the layer.
    """

    stream: int = 0
    norms: int = 0
    attention: int = 0
    heads: int = 0
    core: int = 0
    mlp: int = 0
    router: int = 0
    dispatched: int = 0
    expanded: int = 0
    activated: int = 0
    shared: int = 0
    core_begins: int = 0
    moe_passing: int = 0
    passing: int = 0

    @property
    def total(self) -> int:
        """Without recomputation."""
        before = self.stream + self.norms + self.attention + self.heads + self.core
        return before + self.mlp + self.moe

    @property
    def moe(self) -> int:
        """Of router and experts."""
        return self.router + self.dispatched + self.expanded + self.activated + self.shared

    def recomputed(self, modules: Sequence[str]) -> tuple[int, int]:
        """What is not kept where `modules` of `learner.recompute` are computed again, and the most
        that comes to what is kept at one time: attention's comes after the MLP's backward pass,
        which has given up what it kept."""
        core = self.core - (0 if "mla_up_proj" in modules else self.core_begins)
        attention = {"core_attn": core, "mla_up_proj": self.heads, "layernorm": self.norms}
        mlp = {
            "mlp": self.mlp,
            "moe": self.moe,
            "moe_act": self.activated,
            "shared_experts": self.shared,
        }
        before, after = (
            sum(part[name] for name in modules if name in part) for part in (attention, mlp)
        )
        return before + after, max(after, before - (self.mlp + self.moe - after))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the bytes of a layer follow from: the shape, how it is cut, T, bytes of an element."""

    shape: ModelShape
    cuts: Cuts
    num_tokens: int
    element: int

    def scattered(self, width: int, element: int = 0) -> int:
        """[T, width], each tensor rank its part of the tokens."""
        return -(-self.num_tokens // self.cuts.sequence) * width * (element or self.element)

    def split(self, width: int, element: int = 0) -> int:
        """[T, width], each tensor rank its part of the width."""
        return self.num_tokens * -(-width // self.cuts.tp) * (element or self.element)

    def whole(self, width: int, element: int = 0) -> int:
        """[T, width], all of it."""
        return self.num_tokens * width * (element or self.element)

    def normed(self, width: int) -> int:
        """What a norm of [T, width], of scattered tokens, keeps besides its input and output.

        torch's on a CPU keeps the input times its statistic, in fp32.
        """
        return self.scattered(1, FP32) + (self.scattered(width, FP32) if self.cuts.local else 0)


def layer_kept(sizes: Sizes, kind: str) -> Kept:
    """What a layer of `kind` ("dense" or "moe") keeps where nothing is computed again."""
    shape = sizes.shape
    hidden = sizes.scattered(shape.hidden_size)
    kept = _latent(sizes, shape.mla) if shape.mla is not None else _grouped(sizes)
    kept = replace(kept, stream=2 * hidden, passing=kept.passing + _gloo(sizes))
    if kind == "dense":
        norm = hidden + sizes.normed(shape.hidden_size)
        return replace(kept, mlp=norm + _gated(sizes, shape.intermediate_size))
    assert shape.moe is not None, kind
    norm = hidden + sizes.normed(shape.hidden_size)
    return replace(kept, norms=kept.norms + norm, **_experts(sizes, shape.moe))


def _gated(sizes: Sizes, width: int) -> int:
    """A gated MLP's gate and up, and their product.

    Where one function does not do it all: the activated gate, and the up with its offset of 0 too.
    """
    return sizes.split((3 if sizes.cuts.fused else 5) * width)


def _grouped(sizes: Sizes) -> Kept:
    """Queries in groups that share a key and a value."""
    shape, tp, local = sizes.shape, sizes.cuts.tp, sizes.cuts.local
    heads, groups = -(-shape.num_heads // tp), max(1, shape.num_kv_heads // tp)
    query, key = sizes.whole(heads * shape.head_dim), sizes.whole(groups * shape.head_dim)
    norm = sizes.scattered(shape.hidden_size) + sizes.normed(shape.hidden_size)
    fused = query + 2 * key  # one product, of which keys and values are views
    before = 0 if local and not shape.qk_norm else fused
    if shape.qk_norm:  # queries of several groups are copied from it
        before += (query if groups > 1 else 0) + sizes.whole(heads + groups, FP32)
        before += sizes.whole((heads + groups) * shape.head_dim, FP32) if local else key
    rotated = 4 * round(shape.head_dim * shape.rotary_fraction)  # cosines, sines; of two
    if local:  # copies of queries, keys and values, in which sequences of one length are a batch
        return Kept(
            attention=norm + before + sizes.whole(rotated) + query,
            core=query + fused + _local_core(sizes, heads, 2 * key),
            passing=_gathered(sizes, 2 * key),
            core_begins=query + key + (0 if shape.qk_norm else fused),
        )
    return Kept(
        attention=norm + before + query,
        heads=query + key,  # values are in the product
        core=sizes.whole(heads, FP32),
    )


def _latent(sizes: Sizes, mla: LatentAttention) -> Kept:
    """Queries, keys and values through low ranks; the projections down are whole on every rank."""
    shape, local = sizes.shape, sizes.cuts.local
    heads = -(-shape.num_heads // sizes.cuts.tp)
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    query, value = sizes.whole(heads * width), sizes.whole(heads * mla.v_head_dim)
    down = sizes.scattered(mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = sizes.scattered(mla.kv_lora_rank) + sizes.normed(mla.kv_lora_rank)
    if mla.q_lora_rank is not None:
        down += sizes.scattered(mla.q_lora_rank)
        up += sizes.scattered(mla.q_lora_rank) + sizes.normed(mla.q_lora_rank)
    up += sizes.whole(4 * mla.qk_rope_head_dim)  # cosines, sines; of queries and keys
    norm = sizes.scattered(shape.hidden_size) + sizes.normed(shape.hidden_size)
    all_heads = 2 * query + value
    if local:
        # Values are padded to the width of keys.
        core = 4 * query + _local_core(sizes, heads, 2 * query)
        return Kept(
            norms=norm,
            attention=down + value,
            heads=up,
            core=core,
            core_begins=all_heads,
            passing=_gathered(sizes, 2 * query),
        )
    core = sizes.whole(heads, FP32)
    return Kept(norms=norm, attention=down + value, heads=up + all_heads, core=core)


def _local_core(sizes: Sizes, heads: int, keys_and_values: int) -> int:
    """Attention on a CPU: a row's statistic, and places of queries, of keys, and back.

    Of several context ranks each has the keys and values of all, and places in their order. Masks,
    which they need besides, are left out: they grow with the square of a sequence's length.
    """
    cp = sizes.cuts.cp
    places = 3 if cp == 1 else 2 + 2 * cp
    return sizes.whole(heads, FP32) + sizes.whole(places, INDEX) + (cp - 1) * keys_and_values


def _gloo(sizes: Sizes) -> int:
    """What CPUs still hold of the hidden states that tensor ranks have gathered and scattered.

    Gloo takes copies, and its threads let go of them some time after the result is there. Measured:
    eight at most, of all tokens (tests/learner/test_peaks.py).
    """
    cuts = sizes.cuts
    return 8 * sizes.whole(sizes.shape.hidden_size) if cuts.local and cuts.tp > 1 else 0


def _gathered(sizes: Sizes, keys_and_values: int) -> int:
    """The same of keys and values of all context ranks, before and after they are in order, and
    what attention with a mask works on besides."""
    cp = sizes.cuts.cp
    return 4 * cp * keys_and_values if cp > 1 else 0


def _experts(sizes: Sizes, moe: MixtureOfExperts) -> dict[str, int]:
    """Router, routed experts with as many tokens each, shared experts."""
    cuts, shape = sizes.cuts, sizes.shape
    chosen = -(-sizes.num_tokens // cuts.sequence) * moe.experts_per_token * cuts.etp
    inner = chosen * -(-moe.expert_intermediate_size // cuts.etp) * sizes.element
    outputs = chosen * shape.hidden_size * sizes.element  # of experts, and in the tokens' order
    if cuts.local:  # and expert by expert
        outputs += 2 * outputs + (3 * outputs if cuts.ep * cuts.etp > 1 else 0)
    else:
        outputs *= 2
    places = sizes.scattered(moe.num_experts, INDEX)  # of tokens, sorted by expert
    scores = sizes.scattered(moe.experts_per_token, INDEX + FP32)
    if moe.scoring == "sigmoid":  # of all experts, and the sum of the chosen
        scores += sizes.scattered(moe.num_experts + 1, FP32)
    shared = 0
    if moe.shared_intermediate_size:
        shared = _gated(sizes, moe.shared_intermediate_size)
    return {
        "router": places + scores,
        "dispatched": chosen * (shape.hidden_size * sizes.element + INDEX),
        "expanded": 2 * inner,
        "activated": (1 if cuts.fused else 4) * inner + chosen * FP32,
        "shared": shared,
        "moe_passing": outputs,
    }
