"""Phase times add up; files appear whole or not at all; the run directory continues where a run resumed."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.config import Config
from rhymemeg.errors import ConfigError
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.display import Display, sparkline
from rhymemeg.observe.files import write_atomically
from rhymemeg.observe.run_dir import RunDirectory, check_output_dir, summarise


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.integers(0, 5)), max_size=6))
def test_phases_add_up_to_the_step(phases: list[tuple[str, int, int]]) -> None:
    time = 0.0
    clock = StepClock(now=lambda: time)
    expected: dict[str, float] = {}
    with clock.step():
        for name, outer, inner in phases:
            time += 1
            with clock.phase(name):
                time += outer
                with clock.phase("nested"):
                    time += inner
            expected[name] = expected.get(name, 0) + outer
            expected["nested"] = expected.get("nested", 0) + inner
    got = clock.metrics()
    assert got["perf/step_time"] == time
    assert {k.removeprefix("timing_s/"): v for k, v in got.items() if k.startswith("timing_s/")} == {
        "other": float(len(phases)),
        **expected,
    }


def test_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_atomically(file, "old")

    def fail(out) -> None:
        out.write("half of")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, fail)
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def config(tmp_path: Path) -> Config:
    return Config.from_tree({"output_dir": str(tmp_path / "run"), "tensorboard": False}, where="test")


def test_resumed_run_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    run = RunDirectory(config(tmp_path))
    for step in range(4):
        run.log(step, {"reward/mean": step / 10, "bad": float("nan")})
    run.close()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 4, "rew')
    again = RunDirectory(config(tmp_path), first_step=2)
    again.log(2, {"reward/mean": 0.9})
    again.close()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["step"], r["reward/mean"]) for r in rows] == [(0, 0.0), (1, 0.1), (2, 0.9)]
    assert rows[0]["bad"] is None


def test_unwritable_output_dir_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="--output-dir: cannot write to"):
        RunDirectory(config(tmp_path))


def test_output_dir_is_checked_before_anything_starts(tmp_path: Path) -> None:
    check_output_dir(str(tmp_path / "a" / "b"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output-dir: cannot write to"):
        check_output_dir(str(tmp_path / "file"))


def test_summary_takes_first_and_last_five_steps() -> None:
    rows = [
        {"step": i, "reward/mean": float(i), "rollout/tokens": 10, "timing_s/rollout": 2.0, "perf/step_time": 3.0,
         "actor/train_rollout_logprob_abs_diff": 1e-6 * i}
        for i in range(12)
    ]  # fmt: skip
    summary = summarise(rows)
    assert summary["reward_first_5_steps"] == 2.0 and summary["reward_last_5_steps"] == 9.0
    assert summary["tokens_generated"] == 120 and summary["seconds"] == 36.0
    assert summary["seconds_per_phase"] == {"rollout": 24.0}
    assert summary["train_rollout_logprob_abs_diff_largest_mean"] == pytest.approx(1.1e-5)
    assert summarise([])["steps"] == 0


def test_display_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("lines", 3, "title")
    display.step(
        0, {"reward/mean": 0.25, "rollout/response_len_mean": 80, "timing_s/rollout": 1.5, "perf/step_time": 2}
    )
    line = capsys.readouterr().out
    assert "step    1/3" in line and "reward 0.250" in line and "rollout 1.5" in line
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█" and sparkline([]) == ""


def test_display_panel_renders() -> None:
    from rich.console import Console

    display = Display("off", 3, "title")
    display.step(0, {"reward/mean": 0.25, "timing_s/rollout": 1.5, "timing_s/train": 0.5})
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(display._panel())
    text = console.export_text()
    assert "rollout 1.5s (75%)" in text and "step 1/3" in text
