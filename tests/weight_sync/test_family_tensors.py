"""All families from learner to server ranks in one process: every tensor, in its precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from megarl.actor.shape import ModelShape
from megarl.reshard.engine_tensors import float32_on_server
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.types import ServerEndpoint
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.session import WeightSync
from tests.reshard.models import tiny_shape
from tests.weight_sync import tiny
from tests.weight_sync.rig import Rig

QWEN3, DEEPSEEK, GLM = (
    tiny_shape(f"{name}ForCausalLM") for name in ("Qwen3Moe", "DeepseekV3", "Glm4Moe")
)
ONE_SHARED = tiny_shape(
    "Glm4MoeForCausalLM", moe=dataclasses.replace(GLM.moe, shared_intermediate_size=8)
)
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "mesh", "server", "forms"),
    [
        (QWEN3, LearnerMesh(tp=2, dp=2, ep=4), ServerMesh(4, ep=2), ("te", "sequential")),
        (QWEN3, LearnerMesh(dp=2, ep=2), ServerMesh(2, attention_dp=2), ("te", "per_expert")),
        (QWEN3, LearnerMesh(tp=2, etp=2), ServerMesh(2, ep=2), ("te", "grouped")),
        (DEEPSEEK, LearnerMesh(tp=2, ep=2, pp=2), ServerMesh(2), ("local", "per_expert")),
        (DEEPSEEK, LearnerMesh(dp=2, ep=2), ServerMesh(2, ep=2), ("te", "per_expert")),
        (ONE_SHARED, LearnerMesh(tp=2, etp=2), ServerMesh(2, fused_shared_experts=True), None),
        (GLM, LearnerMesh(tp=2, ep=2), ServerMesh(4, ep=2, attention_dp=2, dp_head=True), None),
    ],
)
def test_every_server_rank_ends_with_exactly_its_slices(
    rig: Callable[..., Rig],
    shape: ModelShape,
    mesh: LearnerMesh,
    server: ServerMesh,
    forms: tuple[str, ...] | None,
    dtype: str,
) -> None:
    spec = SourceSpec(shape, mesh, 8, forms or ("te", "sequential"))
    made = rig(spec, server, dtype)
    for version, seed in enumerate([3, 4]):
        made.learn(seed)
        assert made.sync(version) == []
        weights = tiny.as_sent(tiny.weights(shape, seed), WIRE[dtype])
        wanted = tiny.on_mesh(shape, server, weights)
        layout = made.senders[0].route(made.kind).destination
        for rank, (model, tensors) in enumerate(zip(made.models, wanted, strict=True)):
            wide = float32_on_server(shape, layout, rank)
            assert model.tensors.keys() == tensors.keys()
            for name, tensor in tensors.items():
                kept = torch.float32 if name in wide else WIRE[dtype]
                assert torch.equal(model.tensors[name], tensor.to(kept)), name
        assert [model.derived for model in made.models] == [version + 1] * server.tp


def test_expert_bias_keeps_what_bfloat16_would_lose(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(DEEPSEEK, LearnerMesh(), 8), ServerMesh(), "bf16")
    bias = made.learner[0]["decoder.layers.1.mlp.router.expert_bias"]
    bias.copy_(torch.arange(len(bias)) * 1e-3 + 1.0)
    assert made.sync(1) == []
    held = made.models[0].tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(held, bias) and not torch.equal(bias, bias.to(torch.bfloat16).float())


def test_router_that_the_server_widens_must_hold_what_was_sent(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(GLM, LearnerMesh(), 8), ServerMesh(), "bf16")
    model = made.models[0]

    def meddling() -> None:
        model.tensors["model.layers.1.mlp.gate.weight"].data[0, 0] += 1e-6

    model.post_load_weights = meddling  # type: ignore[method-assign]
    (ack,) = made.receive(made.messages(1))
    assert not ack.ok and "did not come as torch.bfloat16" in ack.error


def test_model_that_cannot_derive_its_weights_is_not_proved(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(DEEPSEEK, LearnerMesh(), 8), ServerMesh())

    def failing() -> None:
        raise ValueError("AWQ dequantize function is not supported for the current device")

    made.models[0].post_load_weights = failing  # type: ignore[method-assign]
    (ack,) = made.receive(made.messages(1))
    assert not ack.ok and "AWQ dequantize function is not supported" in ack.error


def test_bfloat16_router_on_a_server_that_keeps_it_in_float32_is_refused(
    rig: Callable[..., Rig],
) -> None:
    made = rig(SourceSpec(GLM, LearnerMesh(), 8), ServerMesh(), "bf16")
    name = "model.layers.1.mlp.gate.weight"
    router = made.models[0].tensors[name]
    made.models[0].tensors[name] = torch.nn.Parameter(router.detach().to(torch.bfloat16))
    (ack,) = made.receive(made.messages(1))
    assert not ack.ok and f"{name} is" in ack.error and "expected" in ack.error


def test_layout_of_a_server_is_what_it_and_sglangs_arguments_say_together() -> None:
    spec = SourceSpec(QWEN3, LearnerMesh(), 8)
    arguments = ServerMesh(2, attention_dp=2, dp_head=True, up_first=True)
    sync = WeightSync(
        "together", spec, 0, tiny.on_learner(spec, tiny.weights(QWEN3, 0))[0], "fp32",
        server_mesh=arguments, cpu_servers=True,
    )  # fmt: skip
    server = ServerEndpoint("s", "", 4, 0, ep=2, attention_dp=4)
    wanted = ServerMesh(4, cpu=True, ep=2, attention_dp=4, dp_head=True, up_first=True)
    assert sync._kind(server).mesh == wanted
    sync.close()


def test_what_the_server_holds_as_a_buffer_is_filled_too(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(DEEPSEEK, LearnerMesh(), 8), ServerMesh())
    model, name = made.models[0], "model.layers.1.mlp.gate.e_score_correction_bias"
    buffers = {name: model.tensors.pop(name).detach(), "model.rotary.cos_sin_cache": torch.ones(3)}
    model.named_buffers = lambda *_, **__: iter(buffers.items())  # type: ignore[assignment]
    assert made.sync(1) == []
    assert torch.equal(buffers[name], tiny.weights(DEEPSEEK, 0)[name])
    assert torch.equal(buffers["model.rotary.cos_sin_cache"], torch.ones(3))
