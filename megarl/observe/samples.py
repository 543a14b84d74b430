"""What the model wrote, to be read: one object for each sample, with its reward, as text.

Owns the file `RUN/rollouts/v000012/samples.jsonl`. The learner reads tokens from the group files
beside it, never this. Knows nothing of how a reward comes about.
"""

from __future__ import annotations

import json
from pathlib import Path

from megarl import run_paths
from megarl.types import Group, Sample


class SampleLog:
    """Appends groups that were scored to the file of the version that they were asked for with."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def write(self, group: Group, version: int) -> None:
        """Append the samples of one group, whole lines, in their order."""
        path = run_paths.version_folder(self._run_dir, version) / run_paths.SAMPLES
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(_facts(group, sample)) + "\n" for sample in group.samples)
        with path.open("a") as file:
            file.write("".join(lines))


def _facts(group: Group, sample: Sample) -> dict[str, object]:
    reward = sample.reward
    return {
        "sample": sample.sample_id,
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": sample.text,
        "finish": sample.finish_reason,
        "reward": None if reward is None else reward.value,
        "lost": "" if reward is None or reward.state == "value" else reward.reason,
        "advantage": sample.advantage,
    }
