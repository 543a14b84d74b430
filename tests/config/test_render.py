"""A rendered configuration is the same configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from megarl.config.load import read_config
from megarl.config.render import render_config, trained_sides
from megarl.config.schema import Config
from megarl.config.settings import Setting, all_settings

# Text that TOML can hold: everything but lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ENTRIES = st.dictionaries(TEXT, st.one_of(TEXT, st.booleans(), st.integers(-9, 9), NUMBERS))


PATHS = ("actor.model", "critic.model", "reference.model", "prompts.path", "eval.prompts")


def values(setting: Setting) -> st.SearchStrategy[object]:
    """Values that the setting takes."""
    if setting.name in PATHS:
        return st.just('/a folder/with "quotes" and \\ in it')
    if setting.name == "learner.recompute.modules":
        return st.just(["core_attn", "mlp"])
    if setting.name == "reward.function":
        return st.sampled_from(["", "/scores.py:score"])
    match setting.kind:
        case "text":
            return TEXT
        case "flag":
            return st.booleans()
        case "integer":
            return st.integers(1, 60000)
        case "number":
            return st.floats(0.001, 0.999)
        case "list":
            return st.lists(TEXT, max_size=3)
        case "table":
            return ENTRIES
        case "choice":
            return st.just(setting.default)


CONFIGS = st.fixed_dictionaries({name: values(s) for name, s in all_settings().items()})


def config_of(chosen: dict[str, object]) -> Config:
    tree: dict = {}
    for name, value in chosen.items():
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    return Config.model_validate(tree, strict=True)


@settings(max_examples=50)
@given(CONFIGS)
def test_rendered_configuration_reads_back_equal(chosen: dict[str, object]) -> None:
    config = config_of(chosen)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(render_config(config), encoding="utf-8")
        assert read_config(path) == config


def test_rendering_names_every_setting(place) -> None:
    tree = tomllib.loads(render_config(place.load()))

    def missing(model: BaseModel, found: dict) -> list[str]:
        lost = []
        for key, value in model:
            if isinstance(value, BaseModel):
                lost += missing(value, found.get(key, {}))
            elif value != {} and found.get(key) != value:
                lost.append(key)
        return lost

    assert missing(place.load(), tree) == []


def test_rendering_shows_the_derived_values(place) -> None:
    text = render_config(
        place.load(
            "--learner.optimizer_steps_per_rollout=4",
            "--learner.epochs_per_rollout=2",
            "--placement.learner_gpus=8",
            "--learner.parallel.tp=2",
            "--rollout.servers=3",
        )
    )
    assert "# samples per step: 256 (16 prompts x 16)" in text
    assert "# samples per optimizer step: 64 (8 optimizer steps on each rollout batch)" in text
    assert "# worst staleness: 7 optimizer steps, 0 versions" in text
    assert "# learner processes: 8 (tp 2 x pp 1 x dp 4)" in text
    assert "# rollout processes: 3 (3 servers x tp 1)" in text


def test_layouts_in_a_few_words_name_the_axes_in_use_and_a_critic_of_its_own_ranks() -> None:
    settings = {
        "actor": {"model": "m"},
        "advantage": {"estimator": "gae"},
        "learner": {"parallel": {"tp": 2, "cp": 2}},
        "placement": {"learner_gpus": 8},
        "critic": {"ranks": "own", "gpus": 2, "parallel": {"pp": 2}},
    }
    config = Config.model_validate(settings)
    assert trained_sides(config) == "learner tp=2 pp=1 cp=2 dp=2, critic tp=1 pp=2 dp=1"
    beside = Config.model_validate({**settings, "critic": {}})
    assert trained_sides(beside) == "learner tp=2 pp=1 cp=2 dp=2"
