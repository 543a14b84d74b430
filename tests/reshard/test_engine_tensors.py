"""Which tensors of each engine are buffers or float32, by the ranks that hold them."""

from __future__ import annotations

from megarl.reshard.engine_tensors import float32_on_server, learner_buffers
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

DENSE = tiny_shape()
DEEPSEEK, GLM = (tiny_shape(name) for name in ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"))
GATE = "model.layers.1.mlp.gate"  # layer 0 is dense


def test_router_bias_is_a_buffer_of_the_learner_ranks_that_hold_its_layer() -> None:
    layout = megatron_layout(DEEPSEEK, LearnerMesh(tp=2, pp=2))
    bias = "decoder.layers.0.mlp.router.expert_bias"  # the first layer of the second stage
    found = [learner_buffers(DEEPSEEK, layout, rank) for rank in layout.rank_ids]
    assert found == [set(), set(), {bias}, {bias}]
    dense = megatron_layout(DENSE, LearnerMesh())
    assert learner_buffers(DENSE, dense, 0) == set()


def test_servers_keep_router_biases_scales_and_the_router_of_glm_in_float32() -> None:
    def kept(shape, block=None):  # type: ignore[no-untyped-def]
        return float32_on_server(shape, sglang_layout(shape, ServerMesh(2), block), 1)

    assert kept(DENSE) == set()
    assert kept(DEEPSEEK) == {f"{GATE}.e_score_correction_bias"}
    assert kept(GLM) == {f"{GATE}.e_score_correction_bias", f"{GATE}.weight"}
    scales = {name for name in kept(DENSE, (4, 4)) if name.endswith("_scale_inv")}
    assert scales == kept(DENSE, (4, 4))
    assert len(scales) == 4 * DENSE.num_layers  # of qkv, o, gate and up, down


def test_later_stage_of_a_server_keeps_only_its_own_in_float32() -> None:
    layout = sglang_layout(DEEPSEEK, ServerMesh(pp=2))
    found = [float32_on_server(DEEPSEEK, layout, rank) for rank in (0, 1)]
    assert found == [set(), {f"{GATE}.e_score_correction_bias"}]
