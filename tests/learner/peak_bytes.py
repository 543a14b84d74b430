"""The most memory that torch's allocator gives out on a CPU while something runs.

Read off the profiler's memory events: one for each allocation and each release of a tensor's
storage, or of a kernel's workspace, in this process, with its bytes.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile


class PeakBytes:
    """While open, allocations are recorded. `most` is then the highest sum of them, above what was
    there at first; `left` what of it is still there at the end."""

    def __init__(self) -> None:
        self.most = self.left = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> PeakBytes:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events = [
            (event.start_ns(), event.nbytes())
            for event in self._profile.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        for _, size in sorted(events):
            self.left += size
            self.most = max(self.most, self.left)
