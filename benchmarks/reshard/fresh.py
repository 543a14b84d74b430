"""Calls in a process of their own, so that no run finds what another has cached."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")


def in_fresh_process(
    function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """The result of a module's function, called in a new interpreter. Its errors are raised."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()
