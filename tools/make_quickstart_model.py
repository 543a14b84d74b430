"""Make the quickstart's model, tokenizer and problems: a tiny Qwen3 that adds numbers, badly.

    python tools/make_quickstart_model.py [--out examples/quickstart] [--steps 300] [--seed 0]

The model is trained from scratch on problems outside the held-out ones until its mean reward at
temperature 1 is near 0.35, which leaves reinforcement learning something to do. It takes half a
minute on one core.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "\x00\n0123456789+-*=abcdefghijklmnopqrstuvwxyz ?."
PAD, EOS = 0, 1
VOCAB_SIZE = 64  # room behind the characters, so that tensor-parallel ranks share it evenly
PROMPT_LENGTH, ANSWER_LENGTH = 6, 4  # "12+34=" and "046\n"
NUM_HELD_OUT = 256
BATCH, LEARNING_RATE, WARMUP_STEPS = 256, 1e-3, 50


def problem(a: int, b: int) -> dict[str, str]:
    """One row of a prompt file.

    >>> problem(7, 85)
    {'prompt': '07+85=', 'answer': '092'}
    """
    return {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}


def split_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All 10,000 problems in a seeded order: (for training, held out)."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    rows = [problem(a, b) for a, b in pairs]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def character_tokenizer() -> Tokenizer:
    """One token per character."""
    vocab = {character: i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def encode(rows: list[dict[str, str]], tokenizer: Tokenizer) -> torch.Tensor:
    """Problem and answer of each row [rows, PROMPT_LENGTH + ANSWER_LENGTH]."""
    return torch.tensor([tokenizer.encode(r["prompt"] + r["answer"] + "\n").ids for r in rows])


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, problems: torch.Tensor, temperature: float) -> float:
    """Share of `problems` answered right, greedily where temperature is 0."""
    tokens = problems[:, :PROMPT_LENGTH]
    for _ in range(ANSWER_LENGTH):
        logits = model(tokens).logits[:, -1]
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
        tokens = torch.cat([tokens, chosen], 1)
    return (tokens == problems).all(1).float().mean().item()


def warm_start(
    train: torch.Tensor, held_out: torch.Tensor, steps: int, seed: int
) -> Qwen3ForCausalLM:
    """A model trained on `train` for `steps` steps of supervised learning."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            rope_theta=10000.0,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
            dtype=torch.float32,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / WARMUP_STEPS)
    )
    for step in range(1, steps + 1):
        rows = train[torch.randint(len(train), (BATCH,))]
        logits = model(rows[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, PROMPT_LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            greedy, sampled = (accuracy(model, held_out, t) for t in (0.0, 1.0))
            print(f"step {step}: loss {loss.item():.3f} greedy {greedy:.3f} sampled {sampled:.3f}")
    return model


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """A JSONL prompt file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Make everything the quickstart starts from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("examples/quickstart"))
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the warm start")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, held_out = split_problems(arguments.seed)
    tokenizer = character_tokenizer()
    model = warm_start(
        encode(train, tokenizer), encode(held_out, tokenizer), arguments.steps, arguments.seed
    )
    folder = arguments.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "\n", "pad_token": "\x00", "unk_token": "?"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, indent=2) + "\n"
    )
    write_rows(arguments.out / "train.jsonl", train)
    write_rows(arguments.out / "held_out.jsonl", held_out)


if __name__ == "__main__":
    main()
