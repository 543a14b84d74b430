"""Tiny policies of every family: weights by seed, checkpoints, log-probs.

Sizes divide over two ranks of a CPU server, which pads what does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.actor.parameters import block_table
from megarl.actor.shape import LatentAttention, ModelShape
from tests.reshard.models import tiny_shape
from tests.reshard.sglang_checkpoints import YARN, hf_config, moe_shape
from tests.weight_sync import tiny

_SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 300,
}
_EXPERTS = {"expert_intermediate_size": 64, "shared_intermediate_size": 64}

SHAPES: dict[str, ModelShape] = {
    "dense": tiny.SHAPE,
    "qwen2": tiny_shape("Qwen2ForCausalLM", **{**_SIZES, "rope_theta": 10000.0}),
    "llama": tiny_shape("LlamaForCausalLM", **{**_SIZES, "rope_theta": 10000.0}),
    "qwen3_moe": moe_shape(
        "Qwen3MoeForCausalLM", experts={**_EXPERTS, "dense_layers": ()}, **_SIZES
    ),
    "deepseek": moe_shape(
        "DeepseekV3ForCausalLM",
        experts=_EXPERTS,
        mla=LatentAttention(48, 32, 16, 16, 24),
        **{**_SIZES, "num_layers": 3},
    ),
    "glm": moe_shape("Glm4MoeForCausalLM", experts=_EXPERTS, **{**_SIZES, "num_layers": 3}),
}


def save(folder: Path, name: str, seed: int) -> Path:
    """The policy as transformers writes it, with the weights of `seed`."""
    return write(folder, name, tiny.weights(SHAPES[name], seed))


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
    """The policy as transformers writes it, with these weights."""
    shape = SHAPES[name]
    config = hf_config(shape)
    if shape.mla is not None:
        config["rope_scaling"] = {**YARN, "rope_type": "yarn"}
        for field in ("moe_layer_freq", "topk_method", "scoring_func", "ep_size"):
            del config[field]  # transformers does not write them
    stored = {}
    for parameter in block_table(shape).parameters:
        whole = tensors[parameter.name]
        parts = whole if parameter.stacked else (whole,)
        for stored_name, part in zip(parameter.stored_names(), parts, strict=True):
            stored[stored_name] = part.clone()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Oracle:
    """Hugging Face models of one policy, one for each seed, by transformers' own loader."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._models: dict[int, torch.nn.Module] = {}

    def checkpoint(self, seed: int) -> Path:
        """The folder of the weights of `seed`."""
        folder = self._folder / f"seed{seed}"
        return folder if folder.exists() else save(folder, self._name, seed)

    def score(self, seed: int, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        """Log-probs of the response's tokens [len(response)] under the weights of `seed`."""
        from transformers import AutoModelForCausalLM  # learner ranks do not need it

        if seed not in self._models:
            self._models[seed] = AutoModelForCausalLM.from_pretrained(
                self.checkpoint(seed), dtype=torch.float32
            )
        with torch.no_grad():
            logits = self._models[seed](torch.tensor([[*prompt, *response]])).logits[0].float()
        scored = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        return scored[torch.arange(len(response)), torch.tensor(list(response))]
