"""Settings from a file and the command line; every violation at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.load import load_config, read_config
from megarl.errors import ConfigError


def test_command_line_wins_over_the_file(place) -> None:
    config = place.load("--rollout.sampling.max_new_tokens", "8", "--run.seed=5")
    assert (config.rollout.sampling.max_new_tokens, config.run.seed) == (8, 5)


def test_the_last_of_two_overrides_wins(place) -> None:
    assert place.load("--run.seed", "1", "--run.seed", "2").run.seed == 2


def test_paths_in_a_file_are_relative_to_it(place, monkeypatch) -> None:
    monkeypatch.chdir("/")
    config = place.load()
    assert config.actor.model == str(place.model)
    assert config.prompts.path == str(place.folder / "prompts.jsonl")


def test_paths_on_the_command_line_are_relative_to_the_working_directory(
    place, tmp_path, monkeypatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "other.jsonl").write_text("")
    monkeypatch.chdir(here)
    assert place.load("--prompts.path", "other.jsonl").prompts.path == str(here / "other.jsonl")


def test_path_of_a_reward_function_is_relative_to_its_file(place, append) -> None:
    (place.folder / "score.py").write_text("")
    append('[reward]\nkind = "function"\nfunction = "score.py:f"')
    assert place.load().reward.function == f"{place.folder / 'score.py'}:f"


def test_text_settings_take_a_number_as_text(place) -> None:
    assert place.load("--run.name", "7").run.name == "7"


@pytest.mark.parametrize(
    ("arguments", "shuffle"),
    [
        (["--prompts.shuffle"], True),
        (["--prompts.shuffle", "--run.seed", "1"], True),
        (["--prompts.shuffle", "false"], False),
        (["--prompts.shuffle=false"], False),
    ],
)
def test_a_flag_alone_means_true(place, arguments: list[str], shuffle: bool) -> None:
    assert place.load(*arguments).prompts.shuffle is shuffle


def test_lists_come_as_toml(place) -> None:
    assert place.load("--rollout.sampling.stop", '["a", "b"]').rollout.sampling.stop == ["a", "b"]


def test_entries_of_an_escape_table_are_set_one_by_one(place, append) -> None:
    append('[rollout.engine_args]\nlog_level = "info"')
    arguments = ["--rollout.engine_args.sleep_on_idle", "true"]
    assert place.load(*arguments).rollout.engine_args == {
        "log_level": "info",
        "sleep_on_idle": True,
    }


def test_unknown_key_in_the_file_is_named_with_the_nearest(place, append) -> None:
    append("[rollot]\nservers = 2")
    assert place.violation() == (
        f"rollot ({place.file}): there is no such setting; the nearest is the group rollout; "
        "`megarl help rollout` lists it"
    )


def test_unknown_setting_on_the_command_line_is_named_with_the_nearest(place) -> None:
    assert place.violation("--learner.tp", "2") == (
        "learner.tp (command line): there is no such setting; the nearest is learner.parallel.tp"
    )


@pytest.mark.parametrize("word", ["learning_rate", "momentum"])
def test_unknown_setting_of_a_group_that_has_none_alike_gets_the_group_listed(place, word) -> None:
    text = place.violation(f"--learner.optimizer.{word}", "2")
    assert text.startswith(f"learner.optimizer.{word} (command line): there is no such setting; ")
    assert "[learner.optimizer] has lr, warmup_steps, schedule" in text


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--rollout.servers=0", "rollout.servers = 0 (command line): expected integer > 0"),
        ("--rollout.servers=two", 'rollout.servers = "two" (command line): expected integer > 0'),
        ("--rollout.servers=1.5", "rollout.servers = 1.5 (command line): expected integer > 0"),
        ("--rollout.servers=true", "rollout.servers = true (command line): expected integer > 0"),
        ("--kl.coef=nan", "kl.coef = nan (command line): expected number >= 0"),
        ("--kl.coef=inf", "kl.coef = inf (command line): expected number >= 0"),
        ("--loss.clip_low=1", "loss.clip_low = 1 (command line): expected number > 0 < 1"),
        ("--loop.max_staleness=2", "loop.max_staleness = 2 (command line): expected `0`"),
        (
            "--rollout.sampling.stop=a",
            'rollout.sampling.stop = "a" (command line): expected list of texts, '
            'such as ["a", "b"]',
        ),
        (
            "--learner.recompute.modules=mlp,moe",
            'learner.recompute.modules = "mlp,moe" (command line): expected list of `core_attn` or '
            "`layernorm` or `mla_up_proj` or `mlp` or `moe` or `moe_act` or `shared_experts`, "
            'such as ["core_attn"]',
        ),
        (
            "--rollout.engine_args.x=[1]",
            "rollout.engine_args.x = [1] (command line): "
            "expected text, a finite number, or true or false",
        ),
        ("--run.seed", "run.seed (command line): a value is missing; expected integer >= 0"),
        ("seed=1", "'seed=1' (command line): settings have the form --name value"),
    ],
)
def test_wrong_value_is_refused_with_what_is_expected(place, argument: str, text: str) -> None:
    assert place.violation(argument) == text


def test_a_group_given_as_a_value_is_refused(place) -> None:
    place.file.write_text(f"learner = 3\n{place.file.read_text()}")
    assert place.violation() == (
        f"learner = 3 ({place.file}): this is a group of settings; write them under [learner]"
    )


def test_missing_required_setting_says_how_to_set_it(place) -> None:
    place.file.write_text("")
    path = str(place.folder / "prompts.jsonl")
    assert place.violation("--prompts.path", path).startswith(
        f"actor.model is not set; set it in {place.file} or with --actor.model VALUE: Folder of a "
    )


def test_every_violation_is_listed_at_once(
    place, append: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    append("[learner]\nparallel = { tp = 3 }\nspeed = 9\n[kl]\ncoef = -1.0")
    found = place.violations("--run.seeed", "1", "--prompts.path", "/no/such/file")
    assert [text.split()[0] for text in found] == [
        "learner.speed",
        "run.seeed",
        "kl.coef",
        "prompts.path:",
        "learner.parallel.tp",
    ]


def test_combinations_of_a_value_that_is_wrong_itself_are_not_judged(place) -> None:
    assert len(place.violations("--rollout.samples_per_prompt", "-1")) == 1


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file or directory"):
        load_config(tmp_path / "none.toml")


def test_broken_toml_names_file_line_and_column(place) -> None:
    place.file.write_text("[run]\nname = \n")
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML: .*line 2, column 8"):
        place.load()


def test_read_config_judges_values_but_not_this_machine(place) -> None:
    config = read_config(place.file, ["--actor.model", "/elsewhere", "--learner.parallel.tp", "3"])
    assert config.actor.model == "/elsewhere"
    with pytest.raises(ConfigError, match="expected integer"):
        read_config(place.file, ["--run.seed", "x"])


TOO_LARGE = "an integer is beyond 64 bits"
TOO_DEEP = "tables or lists are nested more than 32 deep"
HOSTILE = [
    ("9" * 5000, TOO_LARGE),
    ("0x" + "f" * 5000, TOO_LARGE),
    (str(2**63), TOO_LARGE),
    ("[" * 5000 + "]" * 5000, TOO_DEEP),
    ("[" * 40 + "]" * 40, TOO_DEEP),
]


@pytest.mark.parametrize(("text", "words"), HOSTILE)
@pytest.mark.parametrize("name", ["rollout.servers", "rollout.engine_args.x", "kl.coef"])
def test_value_beyond_toml_on_the_command_line_is_refused_and_not_repeated(
    place, name: str, text: str, words: str
) -> None:
    message = place.violation(f"--{name}", text)
    assert message.startswith(f"{name} = {text[:10]}") and words in message and len(message) < 300


@pytest.mark.parametrize(("text", "words"), HOSTILE)
def test_value_beyond_toml_in_the_file_is_refused(place, append, text: str, words: str) -> None:
    append(f"[run]\nseed = {text}")
    assert place.violation().startswith(f"{place.file}: {words}")


def test_long_wrong_value_is_shown_in_part(place) -> None:
    assert len(place.violation("--rollout.servers", "x" * 5000)) < 200


def test_path_that_is_too_long_for_the_system_does_not_exist(place) -> None:
    found = place.violations("--actor.model", "x" * 5000, "--prompts.path", "y" * 5000)
    assert len([text for text in found if "does not exist" in text]) == 2
