"""The parameter table: Hugging Face names and shapes, each tensor once."""

from __future__ import annotations

import pytest

from megarl.actor.parameters import parameter_table
from tests.reshard.models import FAMILY_FLAGS, tiny_shape


@pytest.mark.parametrize("architecture", FAMILY_FLAGS)
@pytest.mark.parametrize("tie", [False, True])
def test_table_is_the_state_dict_of_the_hugging_face_model(architecture: str, tie: bool) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    shape = tiny_shape(architecture, tie_embeddings=tie)
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    config = config_class(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        num_hidden_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=tie,
        **({} if architecture.startswith("Qwen2") else {"head_dim": shape.head_dim}),
    )
    if architecture.startswith("Qwen2"):
        config.head_dim = shape.head_dim
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    table = parameter_table(shape)
    assert {parameter.name: parameter.shape for parameter in table} == wanted
    assert len(table) == len(wanted)


def test_layers_come_in_the_order_of_the_forward_pass() -> None:
    layers = [p.layer for p in parameter_table(tiny_shape()) if p.layer is not None]
    assert layers == sorted(layers)
    assert set(layers) == {0, 1}
