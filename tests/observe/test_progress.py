"""The live line and the table at the end."""

import io
from pathlib import Path

from megarl.observe.progress import Progress, end_table, progress_line

ROW = {
    "step": 0,
    "reward/mean": 0.25,
    "time/step_s": 0.5,
    "time/rollout_s": 0.3,
    "tokens/generated_per_s": 2048.0,
    "buffer/staleness": 0,
    "mismatch/mean_abs_logprob": 2e-7,
    "mismatch/max_abs_logprob": 4e-6,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_each_step_on_one_line_that_is_rewritten() -> None:
    out = Terminal()
    progress = Progress(total=3, out=out)
    for step in range(3):
        progress.step({**ROW, "step": step})
    assert out.getvalue().count("\r") == 3
    assert out.getvalue().count("\n") == 1
    assert "step 3/3" in out.getvalue()


def test_output_that_is_no_terminal_gets_first_and_last_step_but_not_every_one() -> None:
    out = io.StringIO()
    progress = Progress(total=50, out=out)
    for step in range(50):
        progress.step({**ROW, "step": step})
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/50")
    assert lines[-1].startswith("step 50/50")
    assert len(lines) < 10


def test_note_is_not_overwritten_by_the_next_step() -> None:
    out = Terminal()
    progress = Progress(total=9, out=out)
    progress.step(ROW)
    progress.note("server restarted")
    progress.step({**ROW, "step": 1})
    assert "\r" in out.getvalue()
    assert "server restarted\n" in out.getvalue()


def test_table_compares_first_and_last_steps_and_names_the_folder() -> None:
    rows = [{**ROW, "step": step, "reward/mean": 0.2 if step < 10 else 0.4} for step in range(20)]
    rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"] = 0.5, 0.625
    table = end_table(rows, Path("runs/quickstart"))
    reward = next(line for line in table.splitlines() if line.startswith("mean reward"))
    accuracy = next(line for line in table.splitlines() if line.startswith("greedy"))
    assert reward.split()[-2:] == ["0.200", "0.400"]
    assert accuracy.split()[-2:] == ["0.500", "0.625"]
    assert "runs/quickstart/metrics.jsonl" in table


def test_table_of_a_short_run_compares_its_two_halves() -> None:
    rows = [{**ROW, "step": step, "reward/mean": 0.2 if step < 4 else 0.4} for step in range(8)]
    reward = end_table(rows, Path("runs/x")).splitlines()[1]
    assert reward.split() == ["mean", "reward,", "4", "steps", "0.200", "0.400"]


def test_table_of_a_run_without_any_reward_says_so_instead_of_failing() -> None:
    table = end_table([{"step": 0, "time/step_s": 1.0}], Path("runs/x"))
    assert "-" in table.splitlines()[1]


def test_samples_without_a_reward_show_in_line_and_table_only_where_there_are_any() -> None:
    lost = {**ROW, "reward/failed": 0.25, "reward/timeout": 0.25}
    assert "no reward for 50%" in progress_line(lost, 2)
    assert "no reward" not in progress_line({**ROW, "reward/failed": 0.0}, 2)
    row = end_table([lost, ROW], Path("runs/x")).splitlines()[2]
    assert row.split() == ["share", "of", "samples", "without", "a", "reward", "0.250"]
    assert "without a reward" not in end_table([ROW], Path("runs/x"))


def test_table_names_the_folder_of_exports_where_there_is_one(tmp_path: Path) -> None:
    assert "exports" not in end_table([ROW], tmp_path)
    (tmp_path / "export").mkdir()
    assert f"exports       {tmp_path / 'export'}" in end_table([ROW], tmp_path)


def test_table_of_a_run_that_was_evaluated_once_has_no_last_accuracy() -> None:
    rows = [{**ROW, "eval/accuracy": 0.5}, {k: v for k, v in ROW.items() if k != "eval/accuracy"}]
    line = next(each for each in end_table(rows, Path("r")).splitlines() if "greedy" in each)
    assert line.split()[-2:] == ["0.500", "-"]
