"""What the learner's ranks still work out while servers take the weights.

Owns the waiting. Knows nothing of what is awaited.
"""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

from megarl.errors import WeightSyncError

Value = TypeVar("Value")


class Pending(Generic[Value]):
    """A value that is not known yet: what ranks do for it is `work`, how to do without `instead`.

    `error` says why there is none, where the learner could not work it out.
    """

    def __init__(self, work: str, instead: str = "") -> None:
        self._is_known = threading.Event()
        self._work, self._instead = work, instead
        self._values: list[Value] = []
        self.error = ""

    def settle(self, value: Value, error: str = "") -> None:
        """Give those who wait the value, or why there is none."""
        self._values, self.error = [value], error
        self._is_known.set()

    def wait(self, until: float) -> Value:
        """The value; `until` is a time of `time.monotonic`.

        Raises WeightSyncError where the learner could not work it out, or is late.
        """
        if not self._is_known.wait(max(0.0, until - time.monotonic())):
            raise WeightSyncError(
                f"the learner's ranks did not {self._work} within the deadline; see their logs, "
                f"raise deadline.sync_s{self._instead and f', or {self._instead}'}"
            )
        if self.error:
            raise WeightSyncError(self.error)
        return self._values[0]
