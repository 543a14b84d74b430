"""The verbs of saving, which the learner and a critic with ranks of its own have alike.

Owns what a rank checks before it saves. The work is `saving`'s, which needs Megatron; this needs
none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.learner.saving import Saving


class SavingVerbs(ABC):
    """A rank's verbs of saving; each is collective over all ranks."""

    _saving: Saving
    _mark: Callable[[str], None]

    @abstractmethod
    def _require(self, verb: str) -> None:
        """See that what `verb` needs is here, and that the weights are whole."""

    def save(self, path: str, version: int) -> None:
        """Write weights, optimizer and random state into folder `path`; a critic's beside it."""
        self._require("save")
        self.begin_save(path, version)
        self.end_save(True)

    def begin_save(self, path: str, version: int) -> None:
        """Begin such a save; the state may change when it returns. See `Saving.begin`."""
        self._require("begin_save")
        self._mark("save")
        self._saving.begin(path, version)

    def end_save(self, wait: bool) -> bool:
        """Whether no save is under way any more. See `Saving.end`."""
        self._mark("save")
        return self._saving.end(wait)

    def check_saved(self, path: str) -> str:
        """How what is in folder `path` is not as it was saved; "" where it is."""
        self._mark("reading")
        return self._saving.damage(path)
