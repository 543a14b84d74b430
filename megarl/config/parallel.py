"""The settings that say over which ranks learner and servers are laid out, and where those run.

They describe more than a run can do: what `megarl train` refuses, `megarl reshard explain` plans.
Checks are in `check_parallel.py`; what the settings mean as layouts is in `layouts.py`.
"""

from __future__ import annotations

from typing import Literal

from megarl.config.group import Group, NonNegative, Positive


class RolloutParallelConfig(Group):
    """Layout of one rollout server. A run takes no `pp` as yet; `megarl reshard explain` plans
    all."""

    tp: Positive = 1
    """Tensor-parallel ranks of one pipeline stage of a server."""
    ep: Positive = 1
    """Parts that the routed experts are divided into; each expert is cut over tp / ep ranks."""
    pp: Positive = 1
    """Pipeline stages of one server."""
    attention_dp: Positive = 1
    """Copies of the attention in one server (SGLang's --attn-dp-size)."""

    @property
    def num_ranks(self) -> int:
        """Ranks of one server."""
        return self.tp * self.pp


class RolloutPrecisionConfig(Group):
    """Number formats of the servers."""

    weights: Literal["policy", "fp8"] = "policy"
    """`policy`: as `learner.precision.params`; `fp8`: the linear weights of attention, MLPs and
    experts in float8 (e4m3) in square blocks with a float32 scale each, quantized by the learner
    for every sync, all else in bf16. Servers then start without weights, as docs/float8.md says."""
    fp8_block: Positive = 128
    """Rows and columns of such a block. 128 is what GPU kernels are made for."""


class LearnerParallelConfig(Group):
    """Layout of the learner; the data-parallel size follows from `placement.learner_gpus`."""

    tp: Positive = 1
    """Tensor-parallel ranks."""
    pp: Positive = 1
    """Pipeline stages."""
    vpp: Positive = 1
    """Model chunks of each pipeline stage (virtual pipeline, the interleaved 1F1B schedule). A
    minibatch then runs as many microbatches as a multiple of `pp`, some of them empty if need
    be."""
    cp: Positive = 1
    """Context-parallel ranks: each computes two chunks of every sequence, which is padded to a
    multiple of 2 x cp tokens. That counts to `learner.max_tokens_per_microbatch`, but for a sample
    that is a microbatch alone."""
    sequence_parallel: bool = True
    """Where `tp` is above 1, cut what lies between the tensor-parallel linears by tokens over the
    same ranks: less memory, the same communication. Routed experts are trained with it only."""
    ep: Positive = 1
    """Expert-parallel ranks; with `etp` they divide the ranks of a stage, tp x cp x dp."""
    etp: Positive = 1
    """Tensor-parallel ranks of each routed expert."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the last microbatch's are computed."""
    overlap_param_gather: bool = False
    """Gather what a step has changed during the next one's forward pass. It is complete before
    weights are scored with, published or saved."""
    first_stage_layers: NonNegative = 0
    """Decoder layers of the first pipeline stage. 0 means as many as the others."""
    last_stage_layers: NonNegative = 0
    """Decoder layers of the last pipeline stage. 0 means as many as the others."""
    pipeline_layout: str = ""
    """The pipeline written out in Megatron's letters, such as `Et*3|(tt|)*29,m|L`: E embedding, t
    decoder layer, m MTP layer, L loss, | ends a chunk. Empty means the settings above."""

    @property
    def num_ranks(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def even(self) -> bool:
        """Whether all pipeline stages have the same number of layers."""
        return not (self.first_stage_layers or self.last_stage_layers or self.pipeline_layout)


class PlacementConfig(Group):
    """Which processes run, and where."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """`disaggregated`: learner and servers have processes (on GPUs: devices) of their own;
    `colocated`: the i-th learner rank and the i-th server rank share the i-th GPU in time, as
    docs/colocated.md says."""
    learner_gpus: NonNegative = 0
    """Learner processes, each with one GPU where there is one. 0 means one data-parallel rank."""
    offload_learner_weights: bool = True
    """Colocated: the learner's weights too are in host memory while servers generate; gradients and
    optimizer state always are."""
    release_server_weights: bool = True
    """Colocated: servers release their weights too while the learner learns; the KV cache always
    is."""
    memory_tolerance_mib: NonNegative = 512
    """Colocated: by how much the memory that is left when both sides have given theirs back may
    exceed what it was after the first cycle; the run ends where it grows beyond."""
