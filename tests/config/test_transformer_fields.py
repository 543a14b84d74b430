"""`[learner.transformer_config]` takes what the pinned engine takes, nothing that megarl sets."""

from __future__ import annotations

import json

from megarl.config.transformer_fields import (
    FROM_MODEL,
    SET_BY,
    field_violations,
    known_fields,
)
from tests.megatron_engine import Engine


def test_shipped_list_is_that_of_the_installed_engine(megatron_engine: Engine) -> None:
    printed = megatron_engine.run(
        "tests.returned", "tools.make_transformer_fields", "installed_fields"
    )
    version, fields = json.loads(printed.splitlines()[-1])
    shipped_version, shipped = known_fields()
    assert version == shipped_version
    assert {name: tuple(kinds) for name, kinds in fields.items()} == shipped


def test_fields_that_megarl_sets_exist_in_the_engine() -> None:
    assert FROM_MODEL | set(SET_BY) <= set(known_fields()[1])


def test_fields_are_refused_by_name_and_by_kind() -> None:
    given = {"tensor_model_parallel_size": 2, "num_layers": 3, "mlp_chunks_for_training": "two"}
    assert field_violations(given) == [
        "learner.transformer_config.tensor_model_parallel_size: megarl sets it; use "
        "learner.parallel.tp",
        "learner.transformer_config.num_layers: megarl sets it from the model's config.json; "
        "remove it",
        "learner.transformer_config.mlp_chunks_for_training = 'two': expected integer",
    ]


def test_unknown_field_in_a_configuration_is_named_with_the_nearest(place) -> None:
    assert "the nearest is moe_permute_fusion" in place.violation(
        "--learner.transformer_config.moe_permute_fusoin", "true"
    )
