"""What a critic's settings allow, in words."""

from __future__ import annotations

import json
import shutil

import pytest

from megarl.config.layouts import critic_layout, critic_settings, critic_shape
from megarl.config.render import render_config

GAE = ("--advantage.estimator", "gae")


def test_critic_of_the_policy_s_own_layers_has_no_violation(place) -> None:
    config = place.load(*GAE, "--critic.optimizer.lr", "1e-5")
    assert config.has_critic and config.critic_model == config.actor.model


def test_one_response_for_each_prompt_is_enough_with_a_critic(place) -> None:
    place.load(*GAE, "--rollout.samples_per_prompt", "1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--advantage.gamma 0.9",
            "advantage.gamma = 0.9 has a meaning with advantage.estimator = gae only",
        ),
        (
            "--critic.clip 0.5",
            "critic.clip = 0.5 has a meaning with advantage.estimator = gae only",
        ),
        (
            "--critic.optimizer.lr 1e-4",
            "critic.optimizer.lr = 0.0001 has a meaning with advantage.estimator = gae only",
        ),
        (
            "--kl.where reward --kl.coef 0.1",
            "kl.where = reward has a meaning with advantage.estimator = gae only",
        ),
        (
            "--advantage.estimator gae --advantage.normalize_std false",
            "advantage.normalize_std = False has a meaning with advantage.estimator = grpo only",
        ),
        (
            "--advantage.estimator gae --critic.parallel.tp 2",
            "critic.parallel.tp = 2 with critic.ranks = learner: the critic is on the learner's",
        ),
        (
            "--advantage.estimator gae --critic.gpus 2",
            "critic.gpus = 2 with critic.ranks = learner",
        ),
        (
            "--critic.ranks own",
            "critic.ranks = own has a meaning with advantage.estimator = gae only",
        ),
        (
            "--advantage.estimator gae --critic.ranks own --critic.gpus 3 --critic.parallel.tp 2",
            "critic.gpus = 3 is no multiple of critic.parallel.tp x critic.parallel.pp = 2 x 1 = 2",
        ),
        (
            "--advantage.estimator gae --critic.ranks own --critic.parallel.tp 3",
            "critic.parallel.tp = 3: ",
        ),
        (
            "--advantage.estimator gae --critic.ranks own --critic.parallel.ep 2 --critic.gpus 2",
            "critic.parallel.ep = 2: actor.model has no routed experts",
        ),
        (
            "--advantage.estimator gae --critic.ranks own --placement.mode colocated",
            "critic.ranks = own with placement.mode = colocated",
        ),
        (
            "--advantage.estimator gae --critic.warmup_versions 100",
            "critic.warmup_versions = 100 with loop.versions = 100 leaves the policy no version",
        ),
        (
            "--advantage.estimator gae --critic.optimizer.schedule linear "
            "--critic.optimizer.min_lr 1",
            "critic.optimizer.min_lr = 1.0 is above critic.optimizer.lr",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(place, arguments: str, text: str) -> None:
    assert text in place.violation(*arguments.split())


def test_same_sizes_as_the_learner_s_are_no_violation(place) -> None:
    place.load(*GAE, "--critic.parallel.tp", "1", "--critic.parallel.pp", "1")


def test_critic_of_another_vocabulary_is_refused(place) -> None:
    other = place.folder / "other"
    shutil.copytree(place.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 77}))
    text = place.violation(*GAE, "--critic.model", str(other))
    assert "critic.model has 77 tokens in its vocabulary" in text


def test_critic_whose_model_cannot_be_read_is_refused(place) -> None:
    text = place.violation(*GAE, "--critic.model", str(place.folder / "nowhere"))
    assert text.startswith("critic.model: ") and "nowhere" in text


def test_policy_s_learning_rate_falls_over_the_versions_in_which_it_learns(place) -> None:
    arguments = (*GAE, "--critic.warmup_versions", "10", "--loop.versions", "30")
    config = place.load(*arguments)
    assert (config.num_optimizer_steps, config.num_critic_steps) == (20, 30)
    assert (config.decay_steps, config.critic_decay_steps) == (20, 30)


def test_critic_with_ranks_of_its_own_has_a_layout_of_its_own(place) -> None:
    config = place.load(*GAE, "--critic.ranks", "own", "--critic.parallel.tp", "2")
    assert config.critic_is_apart and config.learner_processes == 1
    theirs = critic_settings(config)
    assert theirs.learner_processes == 2 and theirs.data_parallel == 1
    shape = critic_shape(config)
    assert len(critic_layout(theirs, shape).ranks) == 2
    assert "critic processes: 2 (tp 2 x pp 1 x dp 1)" in render_config(config)
