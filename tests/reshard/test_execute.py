"""Moves carried out on numpy arrays and on torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megarl.reshard.execute import clear_paddings, run
from megarl.reshard.layout import LocalTensor, Padding, RankLayout
from megarl.reshard.plan import Move

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


EXPERT = ((5, 6), (4, 6), (0, 3))  # of a stack of experts, to or from a tensor of one of them


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor])
def test_an_expert_moves_between_a_tensor_of_its_own_and_a_stack(array: Any) -> None:
    own, stack = array(np.arange(12).reshape(4, 3)), array(np.zeros((2, 2, 4), int))
    run(
        [Move(0, 0, "w", EXPERT, "own", (1, 0), "stack", (1, 0, 1))], {"own": own}, {"stack": stack}
    )
    assert stack.tolist() == [[[0] * 4] * 2, [[0, 3, 4, 5], [0, 6, 7, 8]]]
    back = array(np.zeros((4, 3), int))
    run(
        [Move(0, 0, "w", EXPERT, "stack", (1, 0, 1), "own", (1, 0))],
        {"stack": stack},
        {"own": back},
    )
    assert back.tolist() == [[0, 0, 0], [3, 4, 5], [6, 7, 8], [0, 0, 0]]


def test_a_tensor_of_fewer_dims_fills_one_slot_of_a_stack() -> None:
    shared, slots = np.arange(12).reshape(4, 3), np.zeros((2, 2, 3), int)
    run([Move(0, 0, "w", MOVE.box, "a", (1, 0), "b", (1, 0, 0))], {"a": shared}, {"b": slots})
    assert slots.tolist() == [[[0] * 3] * 2, [[3, 4, 5], [6, 7, 8]]]


def test_paddings_of_a_stack_are_cleared() -> None:
    stack = np.ones((2, 3, 2))
    padding = Padding("x", ((1, 2), (0, 3), (1, 2)))
    clear_paddings(RankLayout(0, (LocalTensor("x", (2, 3, 2)),), (), (padding,)), {"x": stack})
    assert stack.tolist() == [[[1, 1]] * 3, [[1, 0]] * 3]
