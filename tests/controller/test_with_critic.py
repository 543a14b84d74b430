"""Policy and critic as one learner: what goes to which of them, and in what order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.config.schema import Config
from megarl.controller.with_critic import LearnerWithCritic
from megarl.errors import CheckpointError, LearnerError
from megarl.learner.client import CriticClient
from megarl.types import Batch, CriticScores, MinibatchPlan, SampleRef, TokenNumbers

REWARDS = (TokenNumbers("s0", b"\0\0\0\0"),)
ADVANTAGES = (TokenNumbers("s0", b"\0\0\x80?"),)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


class Services:
    """Both services: what they were asked, in order, and what they answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.plans: list[MinibatchPlan] = []
        self.saved: list[str] = []
        self.versions = {"learner": 3, "critic": 3}
        self.fails: Exception | None = None

    async def learner(self, name: str, *arguments: Any) -> Any:
        self.asked.append(name)
        if name in ("save", "load"):
            self.saved.append(str(arguments[0]))
        if name == "take_advantages":
            assert arguments == (ADVANTAGES,)
        answers = {
            "score": {"mismatch/mean_ratio": 1.0},
            "step": {"loss/total": 0.5},
            "token_rewards": REWARDS,
            "load": self.versions["learner"],
            "peaks": {"memory/state_bytes": 7},
        }
        return answers.get(name)

    async def critic(self, name: str, *arguments: Any) -> Any:
        if self.fails:
            raise self.fails
        self.asked.append(f"critic {name}")
        if name == "score":
            batch, rewards = arguments
            self.plans += batch.minibatches
            self.rewards = rewards
            return CriticScores({"value/mean": 0.25}, ADVANTAGES)
        if name == "step":
            self.plans.append(arguments[0])
        if name in ("save", "load"):
            self.saved.append(str(arguments[0]))
        answers = {"step": {"value/loss": 0.1}, "load": self.versions["critic"]}
        return answers.get(name, {"memory/state_bytes": 5} if name == "peaks" else None)


@pytest.fixture
def services() -> Services:
    return Services()


def both(services: Services, folder: Path, **kl: Any) -> LearnerWithCritic:
    """The client under test, on a critic of two data-parallel ranks."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    config = Config.model_validate(
        {
            "actor": {"model": str(folder)},
            "advantage": {"estimator": "gae"},
            "critic": {"ranks": "own", "gpus": 2},
            "kl": kl,
        }
    )
    critic = CriticClient("http://critic", "key", config.deadline)
    critic._call = services.critic  # type: ignore[method-assign]
    found = LearnerWithCritic("http://learner", "key", config, folder / "failure.json", critic)
    found._call = services.learner  # type: ignore[method-assign]
    return cast(LearnerWithCritic, found)


def batch() -> Batch:
    refs = tuple(SampleRef(f"s{i}", "g.safetensors", i, 10 + i, 4, 1.0, 0) for i in range(6))
    plan = MinibatchPlan(((refs[:3], refs[3:]),), 42, 24)
    return Batch(0, (plan,), 0, 6)


async def test_critic_scores_beside_the_policy_and_gets_a_schedule_for_its_ranks(
    services: Services, tmp_path: Path
) -> None:
    learner = both(services, tmp_path)
    scores = await learner.score(batch())
    assert scores == {"mismatch/mean_ratio": 1.0, "value/mean": 0.25}
    assert services.rewards == () and "token_rewards" not in services.asked
    assert services.asked[-1] == "take_advantages"
    found = await learner.step(batch().minibatches[0])
    assert found == {"loss/total": 0.5, "value/loss": 0.1}
    scored, stepped = services.plans
    assert scored == stepped and len(scored.schedule) == 2 and scored.num_loss_tokens == 24


async def test_policy_scores_first_where_it_tells_the_rewards_of_tokens(
    services: Services, tmp_path: Path
) -> None:
    learner = both(services, tmp_path, coef=0.1, where="reward")
    await learner.score(batch())
    assert services.asked == ["score", "token_rewards", "critic score", "take_advantages"]
    assert services.rewards == REWARDS


async def test_both_parts_of_a_checkpoint_are_saved_and_must_be_of_one_version(
    services: Services, tmp_path: Path
) -> None:
    learner = both(services, tmp_path)
    await learner.save("/run/megatron", 3)
    assert await learner.load("/run/megatron") == 3
    assert sorted(services.saved) == sorted(["/run/megatron", "/run/megatron-critic"] * 2)
    services.versions["critic"] = 2
    with pytest.raises(CheckpointError, match=r"version 3, the critic's in .*-critic is 2"):
        await learner.load("/run/megatron")


async def test_failure_of_the_critic_is_raised_and_no_advantages_are_given(
    services: Services, tmp_path: Path
) -> None:
    learner = both(services, tmp_path)
    services.fails = LearnerError("score of the critic: critic rank 1 was ended by SIGKILL")
    with pytest.raises(LearnerError, match="critic rank 1"):
        await learner.score(batch())
    assert "take_advantages" not in services.asked


async def test_memory_of_the_critic_s_ranks_has_names_of_its_own(
    services: Services, tmp_path: Path
) -> None:
    peaks = await both(services, tmp_path).peaks()
    assert peaks == {"memory/state_bytes": 7, "memory/critic_state_bytes": 5}
