"""Into which servers weights can be written in place (`exact`), and what shows it.

Owns the table: rows over device, quantization, MoE backend, SGLang version and architecture, each
proved by tests of this repository, refused with the reason, or, where no row says anything,
unproved. Owns what a server says of itself, as far as a mode depends on it. Starts nothing and asks
nobody. What SGLang does is from reading 0.5.23: layers/quantization, layers/moe, model_loader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.actor.families import FAMILIES
from megarl.compat import SGLANG_VERSION
from megarl.config.schema import Config
from megarl.config.served import block_of, overridden_block, served_block
from megarl.config.server_arguments import LAYOUT_UNKNOWN, UP_FIRST_RUNNER
from megarl.config.violation import Violation
from megarl.errors import WeightSyncError
from megarl.reshard.blocks import ScaleBlock

Verdict = Literal["proved", "refused", "unproved"]

WEIGHT_LOADER = "megarl.weight_sync.receiver.load"
"""The value of SGLang's --custom-weight-loader."""
UNQUANTIZED = "none"  # SGLang says null, or "unquant"
_PUBLISH = "tests/weight_sync/test_publish.py"
_FAMILIES = "tests/weight_sync/test_families.py"
_MODES = "tests/weight_sync/test_modes.py"
FLOAT8 = "fp8"
_FLOAT8 = "tests/weight_sync/test_float8_servers.py"
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
        sglang_versions=(SGLANG_VERSION,),
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
        sglang_versions=(SGLANG_VERSION,),
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
        sglang_versions=(SGLANG_VERSION,),
        architectures=("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"),
        shown_by=(
            f"{_FAMILIES}::test_two_syncs_in_a_row_are_served_as_hugging_face_computes_them",
        ),
    ),
    Row(
        "proved",
        "checksums of every weight and scale and log-probs after it, with real servers",
        devices=("cpu",),
        quantizations=(FLOAT8,),
        moe_backends=("auto",),
        sglang_versions=(SGLANG_VERSION,),
        architectures=("Qwen3ForCausalLM",),
        shown_by=(
            f"{_FLOAT8}::test_float8_servers_hold_and_serve_what_an_independent_quantizer_makes",
        ),
    ),
    Row(
        "unproved",
        "no GPU has run float8 in blocks. As SGLang is written, GPUs before Blackwell keep weights "
        "and scales as they are loaded; Blackwell's DeepGEMM kernels pack them anew after loading",
        devices=("cuda",),
        quantizations=(FLOAT8,),
    ),
)
"""The first row that covers a server is its verdict."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. `copies` counts its data-parallel replicas.

    `unknown` are arguments with which nobody here knows what its ranks hold; `fp8_block` is of
    weights in float8 in square blocks.
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
    fp8_block: ScaleBlock | None = None


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


def planned(config: Config, architecture: str, device: str) -> Row:
    """What is known of the servers that a run with these settings starts."""
    backend = str(config.rollout.engine_args.get("moe_runner_backend", "auto"))
    quantization = FLOAT8 if served_block(config) else UNQUANTIZED
    return find(device, quantization, backend, SGLANG_VERSION, architecture)


def check_mode(config: Config, architecture: str, device: str) -> Iterator[Violation]:
    """The modes that write in place, into servers that nobody has shown to take that."""
    mode = config.weight_sync.mode
    row = planned(config, architecture, device)
    if mode in ("exact", "shared") and not config.rollout.urls and row.verdict != "proved":
        yield Violation(
            f"weight_sync.mode = {mode} is {row.verdict} for these servers: {row.why}; use auto "
            "or hf",
            ("weight_sync.mode",),
        )


def can_write(facts: ServerFacts, architecture: str, up_first: bool = False) -> Row:
    """Whether `exact` may be used with a server that says this of itself.

    `up_first` is the order of experts' halves that the learner's plans write.
    """
    if not facts.has_loader:
        return Row(
            "refused",
            f"the server was started without --custom-weight-loader {WEIGHT_LOADER}; without it "
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
    loads_up_first = facts.moe_backend == UP_FIRST_RUNNER and facts.quantization == UNQUANTIZED
    if architecture in _WITH_EXPERTS and loads_up_first != up_first:
        return Row(
            "refused",
            f"with moe_runner_backend {facts.moe_backend} it holds experts as "
            f"{'[up, gate]' if loads_up_first else '[gate, up]'}, and the settings say otherwise; "
            f'set rollout.engine_args.moe_runner_backend = "{facts.moe_backend}"',
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
        quantization, block = _quantization(info)
        return ServerFacts(
            device=device,
            quantization=quantization,
            moe_backend=str(info["moe_runner_backend"]),
            sglang_version=str(info["version"]),
            has_loader=WEIGHT_LOADER in (info["custom_weight_loader"] or ()),
            tp=int(info["tp_size"]),
            pp=int(info["pp_size"]),
            copies=int(info["dp_size"]),
            has_draft=bool(info["speculative_algorithm"]),
            unknown=_unknown(info),
            fp8_block=block,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(
            f"/server_info has no usable {error}; megarl knows SGLang 0.5.23, and this is "
            f"{info.get('version', 'another server')}"
        ) from error


def _quantization(info: Mapping[str, Any]) -> tuple[str, ScaleBlock | None]:
    """How weights are quantized, and in which blocks of float8.

    SGLang says of itself only what its own argument asked for, so that the rest is read from what
    overrides the model's config.json, and from that file where it is on this machine.
    """
    asked, overrides = info["quantization"], info.get("json_model_override_args")
    block = overridden_block(overrides)
    if block is None:
        stored = _stored_quantization(info.get("model_path"))
        block = block_of(stored)
        if stored and asked in (None, "", "unquant"):
            asked = str(stored.get("quant_method") or "unknown")
    elif asked in (None, "", "unquant"):
        asked = FLOAT8
    return (UNQUANTIZED if asked in (None, "", "unquant") else str(asked)), block


def _stored_quantization(model: object) -> Mapping[str, Any]:
    """The `quantization_config` of a model's folder; empty where it has none, or is elsewhere."""
    try:
        config = json.loads((Path(str(model)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _unknown(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments, as name=value, that change what ranks hold in ways that no layout says."""
    return tuple(
        f"{name}={info[name]}"
        for name, harmless in LAYOUT_UNKNOWN.items()
        if not (name == "json_model_override_args" and overridden_block(info.get(name)))
        and info.get(name) not in (None, "", False, 0, *harmless)
        and info[name] not in ([], {}, "{}")
    )
