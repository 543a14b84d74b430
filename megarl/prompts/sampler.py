"""Stage a: which prompts come next, with a cursor that a resumed run continues from.

Owns the order. Knows nothing of how prompts are read or what becomes of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence

from megarl.errors import CheckpointError
from megarl.types import Prompt


class PromptSampler:
    """Draws prompts pass after pass; within a pass each comes once.

    The order of a pass follows from (seed, pass) alone, so the cursor is two numbers.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        assert prompts, "load_prompts gives at least one prompt"
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._digest = _digest(self._prompts)
        self._pass = 0
        self._position = 0
        self._order = self._order_of(0)

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts. A new pass begins where one ends, also in the middle of a draw."""
        drawn: list[Prompt] = []
        while len(drawn) < num_prompts:
            if self._position == len(self._prompts):
                self._pass += 1
                self._position = 0
                self._order = self._order_of(self._pass)
            wanted = num_prompts - len(drawn)
            part = self._order[self._position : self._position + wanted]
            drawn += [self._prompts[index] for index in part]
            self._position += len(part)
        return drawn

    def state(self) -> dict[str, object]:
        """The cursor, as JSON values, with what it is only valid for."""
        return {
            "pass": self._pass,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self._prompts),
            "digest": self._digest,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from `state()` of an earlier run.

        Raises CheckpointError where the prompts, the seed or the shuffling are not those of that
        run.
        """
        mine = self.state()
        for key in ("num_prompts", "digest", "seed", "shuffle"):
            if state.get(key) != mine[key]:
                raise CheckpointError(
                    f"the saved prompt cursor has {key} = {state.get(key)!r}, this run has "
                    f"{mine[key]!r}; use the prompts and seed of the saved run, or another run.name"
                )
        cursor = (state.get("pass"), state.get("position"))
        number, position = cursor
        if not (
            isinstance(number, int)
            and isinstance(position, int)
            and number >= 0
            and 0 <= position <= len(self._prompts)
        ):
            raise CheckpointError(f"the saved prompt cursor {cursor} is broken; use an older one")
        self._pass, self._position = number, position
        self._order = self._order_of(number)

    def _order_of(self, number: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            # A string seed is hashed with SHA-512 by random.Random: the same on every machine.
            random.Random(f"prompts/{self._seed}/{number}").shuffle(order)
        return order


def _digest(prompts: Sequence[Prompt]) -> str:
    """What the prompts are, in a few letters: ids, texts and answers.

    Not their tokens: a chat template may name the day, and a run goes on the day after.
    """
    hashed = hashlib.sha256()
    for prompt in prompts:
        hashed.update(repr((prompt.prompt_id, prompt.text, prompt.answer)).encode())
    return hashed.hexdigest()[:16]
