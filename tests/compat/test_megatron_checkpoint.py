"""What a loaded optimizer state keeps of the checkpoint, and what of the run that loads it."""

from types import SimpleNamespace

import torch

from megarl.compat.megatron_checkpoint import keep_settings
from megarl.compat.megatron_cpu import init_optimizer_state


def optimizer(lr: float) -> SimpleNamespace:
    groups = [
        {"lr": lr, "max_lr": lr, "wd_mult": 1.0, "params": [0]},
        {"lr": lr, "max_lr": lr, "wd_mult": 0.0, "params": [1]},
    ]
    inner = SimpleNamespace(state_dict=lambda: {"param_groups": groups, "state": {}})
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])


def test_loaded_optimizer_keeps_the_steps_and_takes_the_runs_settings() -> None:
    saved = [{"lr": 0.1, "max_lr": 0.1, "wd_mult": m, "step": 7.0} for m in (0.0, 1.0)]
    state = {"optimizer": {"param_groups": saved}, "param_state": "untouched"}
    keep_settings(optimizer(0.5), state)
    assert state == {
        "optimizer": {
            "param_groups": [
                {"lr": 0.5, "max_lr": 0.5, "wd_mult": 1.0, "step": 7.0},
                {"lr": 0.5, "max_lr": 0.5, "wd_mult": 0.0, "step": 7.0},
            ]
        },
        "param_state": "untouched",
    }


def test_optimizer_without_parameters_has_the_step_of_the_others_at_every_save() -> None:
    """Megatron asks each for one; a stage of dense layers has no parameter of the experts'."""
    weight = torch.nn.Parameter(torch.ones(3))
    dense, experts = torch.optim.AdamW([weight]), torch.optim.AdamW([{"params": []}])
    parts = [SimpleNamespace(optimizer=inner) for inner in (dense, experts)]
    chained = SimpleNamespace(chained_optimizers=parts)
    for steps in (0, 1, 2):
        init_optimizer_state(chained)
        for inner in (dense, experts):
            states = inner.state_dict()["state"].values()
            assert [state["step"].item() for state in states] == [steps]
        weight.grad = torch.ones(3)
        for inner in (dense, experts):
            inner.step()
    experts.load_state_dict(experts.state_dict())
