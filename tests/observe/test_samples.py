"""What the model wrote, as lines that a user reads."""

import json
from pathlib import Path

from megarl.observe.samples import SampleLog
from megarl.types import Group, Prompt, Reward, Sample

PROMPT = Prompt("train.jsonl:3", (1, 2), "12+34=", "046")


def sample(index: int, **facts: object) -> Sample:
    return Sample(f"v000012-0000-0{index}", "v000012-0000", PROMPT.prompt_id, (1, 2), **facts)  # type: ignore[arg-type]


def read(run_dir: Path, version: int) -> list[dict[str, object]]:
    path = run_dir / "rollouts" / f"v{version:06d}" / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_sample_is_a_line_with_its_text_and_its_reward(tmp_path: Path) -> None:
    scored = sample(
        0, text="046\n", finish_reason="stop", reward=Reward("value", 1.0), advantage=0.5
    )
    SampleLog(tmp_path).write(Group("v000012-0000", PROMPT, (scored,)), 12)
    assert read(tmp_path, 12) == [
        {
            "sample": "v000012-0000-00",
            "prompt_id": "train.jsonl:3",
            "prompt": "12+34=",
            "answer": "046",
            "response": "046\n",
            "finish": "stop",
            "reward": 1.0,
            "lost": "",
            "advantage": 0.5,
        }
    ]


def test_lost_reward_is_no_number_and_says_why(tmp_path: Path) -> None:
    lost = sample(1, reward=Reward("timeout", None, reason="no score within 1 s"))
    SampleLog(tmp_path).write(Group("v000012-0000", PROMPT, (lost,)), 12)
    (row,) = read(tmp_path, 12)
    assert (row["reward"], row["lost"], row["advantage"]) == (None, "no score within 1 s", None)


def test_groups_of_a_version_follow_each_other_in_one_file(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    for version in (12, 12, 13):
        log.write(Group("g", PROMPT, (sample(0), sample(1))), version)
    assert (len(read(tmp_path, 12)), len(read(tmp_path, 13))) == (4, 2)
