"""The whole idea in one file: six components, seven stages, one process, plain PyTorch.

    python examples/minimal_loop.py [--steps 100] [--lr 1e-4] [--seed 0]

It learns the quickstart's two-digit addition. megarl does the same with a Megatron-Core learner
and SGLang servers in processes of their own; `policy_loss` is the oracle of its loss in the tests.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

# N samples of one rollout batch, P prompt tokens (all prompts have one length), R response tokens,
# padded on the right; T = P + R.
HERE = Path(__file__).parent / "quickstart"
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, MAX_NEW_TOKENS = 16, 16, 4
CLIP, KL_COEF = 0.2, 0.0


@dataclass
class Rollout:
    """What the rollout engine returns: tokens, which the loss sees, log-probs of sampling."""

    tokens_NT: Tensor
    mask_NR: Tensor
    behavior_logp_NR: Tensor


def token_logprobs(
    model: PreTrainedModel, tokens_NT: Tensor, num_response: int, temperature: float = 1.0
) -> Tensor:
    """Log-probs [N, R], in nats, of the last `num_response` tokens."""
    logits_NRV = model(tokens_NT[:, :-1]).logits[:, -num_response:].float()
    logp_NRV = torch.log_softmax(logits_NRV / temperature, -1)
    return logp_NRV.gather(-1, tokens_NT[:, -num_response:, None])[..., 0]


@torch.no_grad()
def generate(actor: PreTrainedModel, prompts_NP: Tensor, eos: int, temperature: float) -> Rollout:
    """Component 2, rollout engine: sample responses; temperature 0 is greedy."""
    tokens, logps, masks = prompts_NP, [], []
    running_N = torch.ones(len(prompts_NP), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        logp_NV = torch.log_softmax(actor(tokens).logits[:, -1].float(), -1)
        next_N1 = logp_NV.argmax(-1, True) if not temperature else logp_NV.exp().multinomial(1)
        tokens = torch.cat([tokens, next_N1], 1)
        logps.append(logp_NV.gather(1, next_N1)[:, 0])
        masks.append(running_N)
        running_N = running_N & (next_N1[:, 0] != eos)
    return Rollout(tokens, torch.stack(masks, 1), torch.stack(logps, 1))


def score(rollout: Rollout, answers: list[str], tokenizer: AutoTokenizer) -> Tensor:
    """Component 3, reward: 1 where the response is the answer, else 0 [N]."""
    num_response = rollout.mask_NR.shape[1]
    texts = [
        tokenizer.decode(row[-num_response:][mask]).strip()
        for row, mask in zip(rollout.tokens_NT, rollout.mask_NR, strict=True)
    ]
    right = [text == answer for text, answer in zip(texts, answers, strict=True)]
    return torch.tensor(right, dtype=torch.float32)


def group_advantages(reward_N: Tensor) -> Tensor:
    """GRPO: each reward against its group, [N]. Source: Shao et al. 2024, section 4.1.2."""
    groups = reward_N.view(-1, SAMPLES_PER_PROMPT)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def policy_loss(
    logp_NR: Tensor,
    old_logp_NR: Tensor,
    advantage_N: Tensor,
    mask_NR: Tensor,
    clip_low: float = CLIP,
    clip_high: float = CLIP,
    reference_logp_NR: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """PPO's clipped surrogate, negated, mean over all loss tokens of the minibatch (a scalar).

    With a reference, kl_coef times the k3 estimate of the KL divergence is added.
    Source: Schulman et al. 2017, eq. 7; Schulman 2020, "Approximating KL divergence", k3.
    """
    ratio = (logp_NR - old_logp_NR).exp()
    gain = advantage_N[:, None]
    loss_NR = -torch.minimum(ratio * gain, ratio.clamp(1 - clip_low, 1 + clip_high) * gain)
    if reference_logp_NR is not None:
        difference = reference_logp_NR - logp_NR
        loss_NR = loss_NR + kl_coef * (difference.exp() - difference - 1)
    return torch.where(mask_NR, loss_NR, 0.0).sum() / mask_NR.sum()


def main() -> None:
    """The loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)

    tokenizer = AutoTokenizer.from_pretrained(HERE / "model")
    rows = [json.loads(line) for line in (HERE / "train.jsonl").read_text().splitlines()]
    random.Random(arguments.seed).shuffle(rows)
    # Component 1, the actor: one policy in two places.
    learner = AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32)
    actor = copy.deepcopy(learner)
    # Component 5, the reference: frozen, and absent where the KL coefficient is 0.
    reference = copy.deepcopy(learner) if KL_COEF else None
    optimizer = torch.optim.AdamW(learner.parameters(), arguments.lr, (0.9, 0.95), weight_decay=0.0)

    for step in range(arguments.steps):
        # a prompts
        chosen = [rows[(step * PROMPTS_PER_STEP + i) % len(rows)] for i in range(PROMPTS_PER_STEP)]
        asked = [row for row in chosen for _ in range(SAMPLES_PER_PROMPT)]
        prompts_NP = torch.tensor(tokenizer([row["prompt"] for row in asked])["input_ids"])
        # b rollout
        rollout = generate(actor, prompts_NP, tokenizer.eos_token_id, temperature=1.0)
        # c reward
        reward_N = score(rollout, [row["answer"] for row in asked], tokenizer)
        # d advantage
        advantage_N = group_advantages(reward_N)
        # e buffer: component 6; here one rollout batch is one minibatch, so it holds a single entry
        buffer = [(rollout, advantage_N)]
        # f learn: component 4, the learner
        for batch, advantages in buffer:
            num_response = batch.mask_NR.shape[1]
            logp_NR = token_logprobs(learner, batch.tokens_NT, num_response)
            ref_logp = None
            if reference is not None:
                with torch.no_grad():
                    ref_logp = token_logprobs(reference, batch.tokens_NT, num_response)
            old, mask = batch.behavior_logp_NR, batch.mask_NR
            loss = policy_loss(logp_NR, old, advantages, mask, CLIP, CLIP, ref_logp, KL_COEF)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
            optimizer.step()
        # g weight sync
        actor.load_state_dict(learner.state_dict())
        print(f"step {step + 1}/{arguments.steps}  reward {reward_N.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
