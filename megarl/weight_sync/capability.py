"""Into which servers weights can be written in place (`exact`), and what shows it.

Owns the table: rows over device, quantization, MoE backend, SGLang version and architecture, each
proved by tests of this repository, refused with the reason, or, where no row says anything,
unproved. Owns what a server says of itself, as far as a mode depends on it. Starts nothing and asks
nobody. What SGLang does is from reading 0.5.23: layers/quantization, layers/moe, model_loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.actor.families import FAMILIES
from megarl.config.server_arguments import LAYOUT_UNKNOWN
from megarl.errors import WeightSyncError
from megarl.weight_sync.control import LOAD_FORMAT

Verdict = Literal["proved", "refused", "unproved"]

UNQUANTIZED = "none"  # SGLang says null, or "unquant"
_PUBLISH = "tests/weight_sync/test_publish.py"
_FAMILIES = "tests/weight_sync/test_families.py"
_MODES = "tests/weight_sync/test_modes.py"
_WITH_EXPERTS = tuple(name for name, family in FAMILIES.items() if family.experts != "none")


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of servers like these; an empty tuple stands for any.

    `shown_by` are the tests of a proved row, as `path::name`.
    """

    verdict: Verdict
    why: str
    devices: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    moe_backends: tuple[str, ...] = ()
    sglang_versions: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    shown_by: tuple[str, ...] = ()

    def covers(self, server: Mapping[str, str]) -> bool:
        """Whether the row speaks of a server with these values, by the names of its fields."""
        return all(
            not getattr(self, name) or value in getattr(self, name)
            for name, value in server.items()
        )


_MARLIN = (
    "awq_marlin",
    "gptq_marlin",
    "awq",
    "gptq",
    "moe_wna16",
    "auto-round",
    "auto-round-int8",
    "compressed-tensors",
    "gguf",
    "bitsandbytes",
    "humming",
)
_FOUR_BITS = (
    "modelopt_fp4",
    "nvfp4_online",
    "modelopt_mixed",
    "petit_nvfp4",
    "mxfp4",
    "mxfp_w4a8",
    "w4afp8",
    "quark",
    "quark_int4fp8_moe",
    "quark_mxfp4",
    "mlx_q4",
)
_EIGHT_BITS = (
    "mxfp8",
    "modelopt",
    "modelopt_fp8",
    "w8a8_int8",
    "w8a8_fp8",
    "modelslim",
    "mlx_q8",
)
_MARLIN_MOE = ("marlin", "experimental_sgl_marlin", "lora_marlin", "humming")
_SHUFFLED_MOE = (
    "flashinfer_trtllm",
    "flashinfer_trtllm_routed",
    "experimental_sgl_trtllm",
    "flashinfer_mxfp4",
    "flashinfer_cutedsl",
    "flashinfer_megamoe",
    "megamoe",
    "lora_cutedsl",
    "aiter",
)

ROWS: tuple[Row, ...] = (
    Row(
        "refused",
        "with --attention-backend intel_amx SGLang packs weights for AMX in place, and what is "
        "written over them is read as packed",
        devices=("cpu with AMX",),
    ),
    Row(
        "refused",
        "its loader repacks weights for Marlin kernels, in place, after loading; parameters no "
        "longer hold what a checkpoint has",
        quantizations=_MARLIN,
    ),
    Row(
        "refused",
        "its parameters are four-bit codes with scales in an order of their own (FP4, MXFP4, "
        "INT4), which no layout describes",
        quantizations=_FOUR_BITS,
    ),
    Row(
        "refused",
        "its scales are not those of fp8 in square blocks, which are the only ones that the "
        "learner computes",
        quantizations=_EIGHT_BITS,
    ),
    Row(
        "refused",
        "flashinfer_cutlass loads experts as [up, gate] (load_up_proj_weight_first), and the sync "
        "writes [gate, up]",
        moe_backends=("flashinfer_cutlass",),
        architectures=_WITH_EXPERTS,
    ),
    Row(
        "refused",
        "triton_kernel keeps experts transposed, which no layout describes",
        moe_backends=("triton_kernel",),
        architectures=_WITH_EXPERTS,
    ),
    Row(
        "refused",
        "this MoE backend repacks experts for Marlin kernels in place",
        moe_backends=_MARLIN_MOE,
        architectures=_WITH_EXPERTS,
    ),
    Row(
        "refused",
        "this MoE backend shuffles experts into blocks after loading, which no layout describes",
        moe_backends=_SHUFFLED_MOE,
        architectures=_WITH_EXPERTS,
    ),
    Row(
        "proved",
        "checksums of every parameter and log-probs after it, with real servers",
        devices=("cpu",),
        quantizations=(UNQUANTIZED,),
        sglang_versions=("0.5.23",),
        architectures=("Qwen3ForCausalLM",),
        shown_by=(
            f"{_PUBLISH}::test_two_publishes_in_a_row_arrive_bit_by_bit_and_are_served",
            f"{_PUBLISH}::test_two_learner_ranks_publish_together_to_both_servers",
        ),
    ),
    Row(
        "proved",
        "checksums of every parameter and log-probs after it, with real servers of TP2",
        devices=("cpu",),
        quantizations=(UNQUANTIZED,),
        sglang_versions=("0.5.23",),
        architectures=("Qwen2ForCausalLM", "LlamaForCausalLM"),
        shown_by=(f"{_MODES}::test_hf_and_disk_leave_in_a_tp2_server_what_exact_leaves",),
    ),
    Row(
        "proved",
        "checksums of every parameter and log-probs after it, with real servers of TP1 and TP2, "
        "with EP2 too",
        devices=("cpu",),
        quantizations=(UNQUANTIZED,),
        moe_backends=("auto",),
        sglang_versions=("0.5.23",),
        architectures=("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"),
        shown_by=(
            f"{_FAMILIES}::test_two_syncs_in_a_row_are_served_as_hugging_face_computes_them",
        ),
    ),
)
"""The first row that covers a server is its verdict."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. `copies` counts its data-parallel replicas.

    `unknown` are arguments with which nobody here knows what its ranks hold.
    """

    device: str
    quantization: str
    moe_backend: str
    sglang_version: str
    has_loader: bool
    tp: int
    pp: int
    copies: int
    has_draft: bool
    unknown: tuple[str, ...] = ()


def find(
    device: str, quantization: str, moe_backend: str, sglang_version: str, architecture: str
) -> Row:
    """What is known of servers like this one; "unproved" where nothing is.

    >>> find("cpu", "none", "auto", "0.5.23", "Qwen3ForCausalLM").verdict
    'proved'
    >>> find("cuda", "none", "auto", "0.5.23", "Qwen3ForCausalLM").verdict
    'unproved'
    >>> find("cuda", "awq_marlin", "auto", "0.5.23", "Qwen3ForCausalLM").verdict
    'refused'
    """
    server = {
        "devices": device,
        "quantizations": quantization,
        "moe_backends": moe_backend,
        "sglang_versions": sglang_version,
        "architectures": architecture,
    }
    if architecture not in FAMILIES:
        return Row("refused", f"megarl has no layout of {architecture}")
    for row in ROWS:
        if row.covers(server):
            return row
    why = (
        f"no test of megarl has written into a server of SGLang {sglang_version} on {device} "
        f"(quantization {quantization}, MoE backend {moe_backend}) with {architecture}"
    )
    return Row("unproved", why)


def can_write(facts: ServerFacts, architecture: str) -> Row:
    """Whether `exact` may be used with a server that says this of itself."""
    if not facts.has_loader:
        return Row(
            "refused",
            f"the server was started without --custom-weight-loader {LOAD_FORMAT}; without it "
            "there is nobody in its processes to write",
        )
    if facts.unknown:
        return Row(
            "refused", f"what its ranks hold with {', '.join(facts.unknown)} is in no layout"
        )
    if facts.copies > 1:
        return Row(
            "refused",
            f"SGLang updates no server of {facts.copies} data-parallel replicas; start one server "
            "for each",
        )
    if facts.pp > 1:
        return Row(
            "refused",
            f"its ranks of {facts.pp} pipeline stages cannot be told apart by SGLang's update call",
        )
    return find(
        facts.device, facts.quantization, facts.moe_backend, facts.sglang_version, architecture
    )


def server_facts(info: Mapping[str, Any]) -> ServerFacts:
    """The facts in what GET /server_info answers.

    Raises WeightSyncError where it is not what SGLang 0.5.23 answers.
    """
    try:
        device = str(info["device"])
        if device == "cpu" and info["attention_backend"] == "intel_amx":
            device = "cpu with AMX"
        quantization = info["quantization"]
        return ServerFacts(
            device=device,
            quantization=UNQUANTIZED if quantization in (None, "", "unquant") else quantization,
            moe_backend=str(info["moe_runner_backend"]),
            sglang_version=str(info["version"]),
            has_loader=LOAD_FORMAT in (info["custom_weight_loader"] or ()),
            tp=int(info["tp_size"]),
            pp=int(info["pp_size"]),
            copies=int(info["dp_size"]),
            has_draft=bool(info["speculative_algorithm"]),
            unknown=_unknown(info),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(
            f"/server_info has no usable {error}; megarl knows SGLang 0.5.23, and this is "
            f"{info.get('version', 'another server')}"
        ) from error


def _unknown(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments, as name=value, that change what ranks hold in ways that no layout says."""
    return tuple(
        f"{name}={info[name]}"
        for name, harmless in LAYOUT_UNKNOWN.items()
        if info.get(name) not in (None, "", False, 0, *harmless)
        and info[name] not in ([], {}, "{}")
    )
