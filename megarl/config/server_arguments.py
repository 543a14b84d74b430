"""What SGLang's own arguments, `[rollout.engine_args]`, do to the layout of a server.

Owns their meaning as a mesh, and the refusal of those whose layout nobody here knows: none may
change what a rank holds without a word. Which arguments SGLang has at all is in
`rollout/engine_args.py`. Source: sglang 0.5.23, arg_groups/moe_hook.py and overrides.py,
layers/moe/fused_moe_triton/layer.py, and the models' shared_experts_fusion_disable_reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.actor.families import FAMILIES
from megarl.actor.shape import ModelShape
from megarl.config.schema import Config
from megarl.config.violation import Violation
from megarl.reshard.mesh import ServerMesh

NO_ALL_TO_ALL = "none"  # the default of SGLang's moe_a2a_backend

PLAIN_RUNNERS = ("auto", "triton", "deep_gemm", "cutlass")
"""Values of moe_runner_backend with which experts are loaded as [gate, up] and [down]."""
UP_FIRST_RUNNER = "flashinfer_cutlass"  # unquantized experts as [up, gate]
UNFUSED_RUNNERS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")  # no fused shared experts
UNFUSED_UNIT = 128  # to whose multiple these pad the columns of an expert on each rank

LAYOUT_UNKNOWN: Mapping[str, tuple[object, ...]] = {
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "dwdp_size": (1,),
    "enable_eplb": (False,),
    "enable_paged_experts": (False,),
    "enable_prefill_cp": (False,),
    "enable_waterfill": (False,),
    "elastic_ep_initial_size": (),
    "ep_join_mode": (),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "json_model_override_args": (),
    "kt_num_gpu_experts": (),
    "kt_weight_path": (),
    "max_ep_size": (),
    "model_impl": ("auto", "sglang"),
    "modelopt_quant": (),
    "moe_dp_size": (1,),
    "quantize_and_serve": (False,),
    "rl_quant_profile": (),
}
"""Arguments that change what ranks hold in ways that no layout says, with values that do not."""

INHERITED = {
    "SGLANG_PP_LAYER_PARTITION": "which layers the pipeline stages of a server have",
    "SGLANG_SHARED_EXPERT_TP1": "how the shared experts are cut",
}
"""Variables of SGLang that servers take over from the shell, and what they change."""


def server_mesh(config: Config, shape: ModelShape, cpu: bool | None = None) -> ServerMesh:
    """The servers' ranks, with what SGLang's arguments do to their layout.

    `cpu` says where they run, None that `launch.device` does, whose auto is taken as GPUs.
    A run serves no draft model and sets no SGLANG_PP_LAYER_PARTITION, so `draft` and `pp_layers`
    are not set. Fusion of shared experts is as on NVIDIA GPUs before Blackwell, where SGLang takes
    flashinfer_trtllm for DeepSeek-V3 by itself and does not fuse.
    """
    parallel, arguments = config.rollout.parallel, config.rollout.engine_args
    on_cpu = config.launch.device == "cpu" if cpu is None else cpu
    return ServerMesh(
        tp=parallel.tp,
        cpu=on_cpu,
        ep=parallel.ep,
        attention_dp=parallel.attention_dp,
        pp=parallel.pp,
        servers=config.rollout.servers,
        dp_head=bool(arguments.get("enable_dp_lm_head")),
        dense_whole=arguments.get("moe_dense_tp_size") == 1,
        shared_whole=_all_to_all(config) != NO_ALL_TO_ALL,
        fused_shared_experts=_fuses(config, shape, on_cpu),
        up_first=_runner(config) == UP_FIRST_RUNNER,
    )


def _all_to_all(config: Config) -> str:
    return str(config.rollout.engine_args.get("moe_a2a_backend", NO_ALL_TO_ALL))


def _runner(config: Config) -> str:
    return str(config.rollout.engine_args.get("moe_runner_backend", PLAIN_RUNNERS[0]))


def _fuses(config: Config, shape: ModelShape, on_cpu: bool) -> bool:
    """Whether SGLang puts the shared experts into slots behind the routed ones."""
    arguments, moe = config.rollout.engine_args, shape.moe
    rule = FAMILIES[shape.architecture].served.fuses_shared
    if rule is None or moe is None or not moe.shared_intermediate_size:
        return False
    if arguments.get("disable_shared_experts_fusion") or _runner(config) in UNFUSED_RUNNERS:
        return False
    if rule.enforced and arguments.get("enforce_shared_experts_fusion"):
        return True
    if on_cpu or config.rollout.parallel.ep > 1:
        return False
    if _all_to_all(config) != NO_ALL_TO_ALL:
        return False
    overlapped = ("enable_two_batch_overlap", "enable_single_batch_overlap")
    if not rule.overlapped and any(arguments.get(name) for name in overlapped):
        return False
    if rule.only_one and moe.shared_intermediate_size != moe.expert_intermediate_size:
        return False
    return not rule.num_experts or moe.num_experts in rule.num_experts


def unknown_arguments(config: Config) -> Iterator[Violation]:
    """Arguments that change what ranks hold in ways that no layout says, whatever the model is."""
    arguments = config.rollout.engine_args
    size = arguments.get("attn_dp_size", 1)
    if size != 1:
        yield _violation("attn_dp_size", size, "megarl sets it; use rollout.parallel.attention_dp")
    yield from _check_dense(config)
    for name, harmless in LAYOUT_UNKNOWN.items():
        if name not in arguments or arguments[name] in harmless:
            continue
        reason = "what the servers' ranks then hold is not known; leave it out"
        if harmless:
            reason += f", or use {' or '.join(_toml(value) for value in harmless)}"
        yield _violation(name, arguments[name], reason)


def _check_dense(config: Config) -> Iterator[Violation]:
    """SGLang refuses what is neither 1 nor its tp_size, which is as if it were not set.

    Source: sglang 0.5.23, arg_groups/validation_hook.py.
    """
    name, tp = "moe_dense_tp_size", config.rollout.parallel.tp
    size = config.rollout.engine_args.get(name)
    if size is not None and not (isinstance(size, int) and size in (1, tp)):
        allowed = "1" if tp == 1 else f"1, or {tp} as rollout.parallel.tp"
        yield _violation(name, size, f"SGLang takes only {allowed}; use that, or leave it out")


def argument_violations(
    config: Config, shape: ModelShape | None, environ: Mapping[str, str]
) -> Iterator[Violation]:
    """What SGLang's arguments, and variables, keep from being laid out.

    `shape` is None where the model cannot be read; what depends on it is then not checked.
    """
    parallel, arguments = config.rollout.parallel, config.rollout.engine_args
    yield from unknown_arguments(config)
    for name, changed in INHERITED.items():
        if environ.get(name):
            yield Violation(
                f"{name} = {environ[name]} in the environment: servers take it over, and it "
                f"changes {changed}; unset it",
                (),
            )
    if arguments.get("enable_dp_lm_head") and parallel.attention_dp == 1:
        yield Violation(
            "rollout.engine_args.enable_dp_lm_head needs rollout.parallel.attention_dp above 1",
            ("rollout.engine_args", "rollout.parallel.attention_dp"),
        )
    yield from _check_all_to_all(config, shape)
    yield from _check_runner(config, shape)


def _check_all_to_all(config: Config, shape: ModelShape | None) -> Iterator[Violation]:
    parallel, name, backend = config.rollout.parallel, "moe_a2a_backend", _all_to_all(config)
    if backend == NO_ALL_TO_ALL:
        return
    if shape is not None:
        known = FAMILIES[shape.architecture].served.all_to_all
        if backend not in known:
            use = (
                f"use {' or '.join(map(_toml, known))}, or leave it out"
                if known
                else "leave it out"
            )
            reason = f"what ranks of SGLang's {shape.architecture} then hold is not known; {use}"
            yield _violation(name, backend, reason)
            return
    if config.rollout.engine_args.get("enforce_shared_experts_fusion"):
        reason = (
            "no layout has fused shared experts with it; leave out enforce_shared_experts_fusion"
        )
        yield _violation(name, backend, reason)
    if parallel.tp == 1:
        yield _violation(
            name, backend, "a server of one rank has nothing to exchange; leave it out"
        )
    # SGLang then sets ep to tp by itself: _a2a_ep_size.
    if parallel.ep != parallel.tp:
        yield Violation(
            f"rollout.engine_args.{name} = {_toml(backend)} gives each rank whole experts; "
            f"use rollout.parallel.ep = {parallel.tp}, as many as rollout.parallel.tp",
            ("rollout.engine_args", "rollout.parallel.ep", "rollout.parallel.tp"),
        )


def _check_runner(config: Config, shape: ModelShape | None) -> Iterator[Violation]:
    parallel, name, runner = config.rollout.parallel, "moe_runner_backend", _runner(config)
    known = (*PLAIN_RUNNERS, UP_FIRST_RUNNER, *UNFUSED_RUNNERS)
    if runner not in known:
        reason = f"how it holds experts is not known; use {' or '.join(map(_toml, known))}"
        yield _violation(name, runner, reason)
    if runner == UP_FIRST_RUNNER:
        if config.rollout.precision.weights == "fp8":
            reason = "SGLang has it for unquantized experts; leave it out with float8 servers"
            yield _violation(name, runner, reason)
        if config.launch.device == "cpu":
            yield _violation(name, runner, "a CPU has no such kernel; leave it out")
        if parallel.ep not in (1, parallel.tp):
            reason = f"SGLang wants rollout.parallel.ep = 1 or {parallel.tp} (tp) with it"
            yield _violation(name, runner, reason)
    if runner in UNFUSED_RUNNERS and shape is not None and shape.moe is not None:
        size, expert_tp = shape.moe.expert_intermediate_size, max(1, parallel.tp // parallel.ep)
        if size % (expert_tp * UNFUSED_UNIT):
            yield _violation(
                name,
                runner,
                f"it pads an expert's {size} columns, cut over tp / ep = {expert_tp} ranks, to "
                f"multiples of {UNFUSED_UNIT}, which no layout says; use another, or a larger "
                "rollout.parallel.ep",
            )


def _violation(name: str, found: object, reason: str) -> Violation:
    text = f"rollout.engine_args.{name} = {_toml(found)}: {reason}"
    return Violation(text, ("rollout.engine_args",))


def _toml(value: object) -> str:
    """A value as a settings file has it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
