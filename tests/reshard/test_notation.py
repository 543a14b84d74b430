"""The notation says of every layout what each shard holds, and stays short."""

from __future__ import annotations

import re

import pytest

from megarl.actor.parameters import block_table
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.notation import describe, stage_lines, tensor_text
from megarl.reshard.pipeline import Pipeline
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

QWEN = tiny_shape(num_layers=4)
DEEPSEEK = tiny_shape("DeepseekV3ForCausalLM", num_layers=4)


def line_of(layout: Layout, name: str) -> str:
    """The one line about a local tensor."""
    (line,) = [
        text for text in describe(layout).splitlines() if text.strip().startswith(f"{name} ")
    ]
    return line.strip()


def test_column_cut_tensor_of_the_learner_is_read_off_its_line() -> None:
    layout = megatron_layout(QWEN, LearnerMesh(tp=2, dp=2))
    assert line_of(layout, "decoder.layers.{layer}.mlp.linear_fc1.weight") == (
        "decoder.layers.{layer}.mlp.linear_fc1.weight [16, 8] 2 shards x 2 replicas: "
        "0: gate_proj[0:8]->0 up_proj[0:8]->8  1: gate_proj[8:16]->0 up_proj[8:16]->8"
    )


def test_key_value_copies_of_a_server_are_read_off_its_line() -> None:
    layout = sglang_layout(QWEN, ServerMesh(tp=4))
    assert line_of(layout, "model.layers.{layer}.self_attn.qkv_proj.weight") == (
        "model.layers.{layer}.self_attn.qkv_proj.weight [12, 8] 4 shards: "
        "0: q_proj[0:4]->0 k_proj[0:4]->4 v_proj[0:4]->8  "
        "1: q_proj[4:8]->0 k_proj[0:4]->4 v_proj[0:4]->8  ...  "
        "3: q_proj[12:16]->0 k_proj[4:8]->4 v_proj[4:8]->8"
    )


def test_experts_with_a_tensor_each_share_a_line() -> None:
    layout = megatron_layout(DEEPSEEK, LearnerMesh(dp=2, ep=2))
    line = line_of(layout, "decoder.layers.{layer}.mlp.experts.linear_fc1.weight0")
    assert "0: experts.*.gate_proj[0]->0 experts.*.up_proj[0]->8" in line
    assert line.endswith("(and 1 more, to decoder.layers.{layer}.mlp.experts.linear_fc1.weight1)")


def test_padding_is_shown_as_zeros_in_the_local_tensor() -> None:
    layout = megatron_layout(QWEN, LearnerMesh(tp=2))
    line = line_of(layout, "embedding.word_embeddings.weight")
    assert line.startswith("embedding.word_embeddings.weight [128, 8] 2 shards: ")
    assert line.endswith("0: embed_tokens->0 0->[100:128, 0:8]  1: 0->[0:128, 0:8]")


def test_checkpoint_files_have_the_same_notation() -> None:
    text = describe(full_layout(block_table(QWEN)))
    assert "model.layers.{layer}.mlp.up_proj.weight [16, 8] 1 shard: up_proj->0" in text


def test_stages_name_their_ranks_and_blocks() -> None:
    pipeline = Pipeline.uneven(4, 2, first=1)
    layout = megatron_layout(DEEPSEEK, LearnerMesh(pp=2, dp=2), pipeline=pipeline)
    assert stage_lines(layout) == [
        "ranks 0, 1: embedding, dense 0",
        "ranks 2, 3: moe 1..3, final_norm, head",
    ]


@pytest.mark.parametrize(
    "layout",
    [
        megatron_layout(DEEPSEEK, LearnerMesh(tp=2, pp=2, dp=2, ep=2)),
        sglang_layout(DEEPSEEK, ServerMesh(tp=4, ep=2, attention_dp=2, servers=2)),
    ],
    ids=["learner", "servers"],
)
def test_pieces_are_read_back_from_the_notation(layout: Layout) -> None:
    shapes = {p.name: p.shape for kind in layout.table.kinds.values() for p in kind}
    for template in layout.templates:
        for tensor in template.tensors:
            pieces = [piece for shard in tensor.shards for piece in shard.pieces]
            if len(tensor.shards) > 3 or any(len(shard.pieces) > 4 for shard in tensor.shards):
                continue  # the middle is left out
            _, _, text = tensor_text(tensor, shapes).partition(": ")
            written = [part for part in PIECE.findall(text) if part[0] != "0"]
            assert len(written) == len(pieces)
            for (name, box, at), piece in zip(written, pieces, strict=True):
                assert piece.tensor.removesuffix(".weight").endswith(name)
                assert boxed(box, shapes[piece.tensor]) == piece.box
                assert filled(at, len(piece.at)) == piece.at


PIECE = re.compile(r"([\w.*]+)(\[[^]]*])?->([\d,]+)")


def boxed(text: str, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The box that is written, with what is left out."""
    spans = [span.strip() for span in text.strip("[]").split(",") if span.strip()]
    spans += [":"] * (len(shape) - len(spans))
    found = []
    for span, size in zip(spans, shape, strict=True):
        first, colon, end = span.partition(":")
        start = int(first or 0)
        found.append((start, int(end or size) if colon else start + 1))
    return tuple(found)


def filled(text: str, dims: int) -> tuple[int, ...]:
    at = tuple(int(number) for number in text.split(","))
    return at + (0,) * (dims - len(at))
