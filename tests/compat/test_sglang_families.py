"""What a CPU server needs for routed experts over ranks, against the plain sum over experts.

That SGLang then serves these families is shown by `tests/weight_sync/test_families.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megarl.compat import sglang_deepseek_config, sglang_expert_parallel, sglang_latent_attention

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 10, 8, 6, 4, 2
PLAIN = SimpleNamespace(
    activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False
)  # fields of SGLang's MoeRunnerConfig


def module() -> Any:
    """SGLang's module, with a function that must not be called."""

    def whole(*_: object) -> str:
        return "all experts are here"

    return SimpleNamespace(moe_forward_native=whole)


def layers() -> tuple[list[SimpleNamespace], torch.Tensor, torch.Tensor]:
    """The same layer on two ranks, and all of its weights."""
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    halves = zip(w13.chunk(2), w2.chunk(2), strict=True)
    made = [SimpleNamespace(moe_ep_size=2, w13_weight=a, w2_weight=b) for a, b in halves]
    return made, w13, w2


def test_sums_of_the_ranks_add_up_to_the_layer() -> None:
    torch.manual_seed(1)
    ranks, w13, w2 = layers()
    x, ids = torch.randn(TOKENS, HIDDEN), torch.stack([torch.randperm(EXPERTS)[:CHOSEN]] * TOKENS)
    ids[0], weights = torch.tensor([0, 3]), torch.rand(TOKENS, CHOSEN)
    served = module()
    sglang_expert_parallel._wrap(served)
    total = torch.zeros(TOKENS, HIDDEN)
    for rank, layer in enumerate(ranks):
        mine = (ids >= rank * 2) & (ids < rank * 2 + 2)
        local = torch.where(mine, ids - rank * 2, -1)  # as SGLang's dispatcher gives them
        topk = SimpleNamespace(topk_weights=weights, topk_ids=local)
        total += served.moe_forward_native(layer, x, topk, PLAIN)
    for token in range(TOKENS):
        wanted = torch.zeros(HIDDEN)
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            wanted += weight * (w2[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(total[token], wanted)


def test_layer_with_all_experts_keeps_sglangs_own_function() -> None:
    served = module()
    sglang_expert_parallel._wrap(served)
    layer = SimpleNamespace(moe_ep_size=1)
    assert served.moe_forward_native(layer, None, None, PLAIN) == "all experts are here"


@pytest.mark.parametrize("change", [{"activation": "gelu"}, {"gemm1_alpha": 1.7}])
def test_layer_of_another_mathematics_is_refused(change: dict[str, object]) -> None:
    served, (ranks, _, _) = module(), layers()
    sglang_expert_parallel._wrap(served)
    with pytest.raises(NotImplementedError, match=r"rollout.parallel.ep = 1"):
        other = SimpleNamespace(**{**vars(PLAIN), **change})
        served.moe_forward_native(ranks[0], torch.zeros(1, HIDDEN), None, other)


def test_what_a_checkpoint_or_an_engine_says_goes_before() -> None:
    class Config:
        topk_method = "greedy"

    sglang_deepseek_config._complete(SimpleNamespace(DeepseekV3Config=Config))
    assert (Config.topk_method, Config.moe_layer_freq) == ("greedy", 1)  # type: ignore[attr-defined]

    class Registry:
        _handlers = {"torch_native": "its own"}

    handler = SimpleNamespace(AttentionBackendRegistry=Registry, _dispatch_mla_subtype="ours")
    sglang_latent_attention._register(handler)
    assert Registry._handlers == {"torch_native": "its own"}
