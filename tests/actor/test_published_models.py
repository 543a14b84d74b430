"""Published configs of large models: read at their published size."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers

from megarl.actor.parameters import BlockTable, block_table
from megarl.actor.shape import Llama3Rope, ModelShape, Yarn, read_shape
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.sglang import sglang_layout
from tests.actor.published import FP8, PUBLISHED

# Elements as the hubs' safetensors metadata counts them (tied embeddings once).
NUM_ELEMENTS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V3": 684_531_386_000,
    "GLM-4.5": 358_337_791_296,
    "GLM-4.5-Air": 110_468_824_832,
}


def read(name: str, folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return read_shape(folder)


def num_elements(table: BlockTable, precision: str | None = None) -> int:
    return sum(
        parameter.num_elements
        for parameter in table.parameters
        if precision in (None, parameter.precision)
    )


def num_duplicated(table: BlockTable, shape: ModelShape) -> int:
    """Elements of the second copies of the embedding and the head."""
    return len(table.duplicates) * shape.vocab_size * shape.hidden_size


@pytest.mark.parametrize("name", NUM_ELEMENTS)
def test_published_model_has_its_published_number_of_elements(name: str, tmp_path: Path) -> None:
    shape = read(name, tmp_path)
    table = block_table(shape, shape.fp8_block)
    assert num_elements(table) + num_duplicated(table, shape) == NUM_ELEMENTS[name]


def test_elements_of_deepseek_v3_are_stored_in_the_published_precisions(tmp_path: Path) -> None:
    shape = read("DeepSeek-V3", tmp_path)
    table = block_table(shape, shape.fp8_block)
    assert num_elements(table, "float8") == 680_571_043_840
    assert num_elements(table, "float32") == 41_555_600
    assert num_elements(table, "policy") + num_duplicated(table, shape) == 3_918_786_560


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_as_many_elements_as_the_hugging_face_model(
    name: str, tmp_path: Path
) -> None:
    shape = read(name, tmp_path)
    # transformers writes into the objects that it is given.
    config = {k: deepcopy(v) for k, v in PUBLISHED[name].items() if k not in FP8}
    stem = shape.architecture.removesuffix("ForCausalLM")
    with torch.device("meta"):
        model = getattr(transformers, shape.architecture)(
            getattr(transformers, f"{stem}Config")(**config)
        )
    tensors = dict(model.named_parameters())  # tied ones once
    tensors |= {k: v for k, v in model.state_dict().items() if k.endswith("correction_bias")}
    found = sum(tensor.numel() for tensor in tensors.values())
    layers = [p for p in block_table(shape).parameters if (p.layer or 0) < shape.num_layers]
    assert sum(parameter.num_elements for parameter in layers) == found


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_of_a_published_model_survives_json(name: str, tmp_path: Path) -> None:
    shape = read(name, tmp_path)
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


def test_full_rank_queries_of_moonlight_are_laid_out_for_both_engines(tmp_path: Path) -> None:
    shape = read("Moonlight-16B-A3B", tmp_path)
    query = "model.layers.0.self_attn.q_proj.weight"
    local = {"megatron": "linear_q_proj", "sglang": "q_proj"}
    for layout in (megatron_layout(shape, LearnerMesh(tp=2)), sglang_layout(shape, ServerMesh(2))):
        second = [piece for piece in layout.rank(1).pieces if piece.tensor == query]
        assert [piece.box for piece in second] == [((1536, 3072), (0, 2048))]
        assert second[0].local.endswith(f".{local[layout.kind.split()[0]]}.weight")


def test_what_decides_the_mathematics_of_published_models_is_read(tmp_path: Path) -> None:
    assert read("Llama-3.1-8B", tmp_path).rope_scaling == Llama3Rope(8.0)
    deepseek = read("DeepSeek-V3", tmp_path)
    assert deepseek.rope_scaling == Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert (deepseek.num_mtp_layers, deepseek.fp8_block) == (1, (128, 128))
    assert (deepseek.head_dim, deepseek.num_kv_heads) == (192, 128)
    assert deepseek.layer_kinds == ("dense",) * 3 + ("moe",) * 58
    assert deepseek.moe is not None
    assert (deepseek.moe.num_groups, deepseek.moe.groups_per_token) == (8, 4)
    assert (deepseek.moe.scaling, deepseek.moe.scoring) == (2.5, "sigmoid")
    moonlight = read("Moonlight-16B-A3B", tmp_path)
    assert moonlight.mla is not None and moonlight.mla.q_lora_rank is None
    assert moonlight.moe is not None and moonlight.moe.shared_intermediate_size == 2816
    assert moonlight.rope_scaling is None and moonlight.fp8_block is None
    glm = read("GLM-4.5", tmp_path)
    assert (glm.qkv_bias, glm.qk_norm, glm.rotary_fraction) == (True, True, 0.5)
    qwen = read("Qwen3-30B-A3B", tmp_path)
    assert qwen.layer_kinds == ("moe",) * 48
    assert qwen.moe is not None and (qwen.moe.normalize, qwen.moe.scoring) == (True, "softmax")
