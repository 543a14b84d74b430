"""Moves carried out on numpy arrays and on torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from megarl.reshard.execute import clear_paddings, run
from megarl.reshard.layout import LocalTensor, Padding, RankLayout
from megarl.reshard.proof import Move

MOVE = Move(0, 0, "w", ((4, 6), (0, 3)), "a", (1, 0), "b", (0, 1))


def test_a_box_is_copied_between_numpy_arrays() -> None:
    source, target = np.arange(12).reshape(4, 3), np.zeros((2, 4), int)
    run([MOVE], {"a": source}, {"b": target})
    assert target.tolist() == [[0, 3, 4, 5], [0, 6, 7, 8]]


def test_a_box_is_copied_and_cast_between_torch_tensors() -> None:
    source, target = torch.arange(12.0).reshape(4, 3), torch.zeros(2, 4, dtype=torch.bfloat16)
    run([MOVE], {"a": source}, {"b": target})
    assert target.tolist() == [[0, 3, 4, 5], [0, 6, 7, 8]]


def test_a_parameter_is_written_in_place_without_grad() -> None:
    target = torch.nn.Parameter(torch.zeros(2, 4))
    with torch.no_grad():
        run([MOVE], {"a": torch.ones(4, 3)}, {"b": target})
    assert target.sum() == 6


def test_paddings_are_cleared_and_nothing_else() -> None:
    tensor = np.ones((3, 2))
    rank = RankLayout(0, (LocalTensor("x", (3, 2)),), (), (Padding("x", ((2, 3), (0, 2))),))
    clear_paddings(rank, {"x": tensor})
    assert tensor.tolist() == [[1, 1], [1, 1], [0, 0]]
