"""The page about a run: what it shows, how large it is, that it needs no network, and what bad input does."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.observe.read_run import read_run
from rhymemeg.report import charts
from rhymemeg.report.command import main, write_report
from rhymemeg.report.engines import chosen_engines
from rhymemeg.report.page import page, phase_layers
from tests.report.runs import make_run

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
VOID = {"meta", "link", "path", "circle", "br"}


class Outline(HTMLParser):
    """Checks that tags close in order, and collects headings, captions and drawn numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.captions: list[str] = []
        self.paths: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "path":
            self.paths.append(dict(attrs)["d"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        if tag == "path":
            self.paths.append(dict(attrs)["d"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("figcaption", "h2"):
            self.captions.append(data)


def outline(text: str) -> Outline:
    parsed = Outline()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    assert not any(bad in d for d in parsed.paths for bad in ("nan", "inf"))
    return parsed


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "small", 12, engines=4)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "large", 1000, engines=64)


def test_all_parts_are_there(small: Path) -> None:
    found = outline(page(read_run(small))).captions
    for caption in (
        "Reward", "Held-out reward", "Response length in tokens", "Seconds of a step by phase", "Drafts",
        "Idle share of engines in the rollout", "Idle share of each engine in each window",
        "Engines over the last 8 windows", "Window of step 11, the last", "Seconds of a weight update",
    ):  # fmt: skip
        assert caption in found, caption


def test_a_run_without_windows_and_without_drafts(tmp_path: Path) -> None:
    text = page(read_run(make_run(tmp_path / "plain", 3, histospec=False)))
    found = outline(text).captions
    assert "Reward" in found and "Drafts" not in found
    assert not any("Window" in caption for caption in found)
    assert "No windows.jsonl in this run" in text


def test_one_step_and_no_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "reward/mean": 0.5, "timing_s/rollout": 1.0, "perf/step_time": 1.0}\n'
    )
    text = page(read_run(folder))
    assert "no config.yaml" in text and "Reward" in outline(text).captions


def test_phases_of_the_page_add_up_to_the_step(small: Path) -> None:
    run = read_run(small)
    _, layers = phase_layers(run)
    np.testing.assert_allclose(sum(layers.values()), run.series("perf/step_time")[1], rtol=1e-12)


def test_comparison_draws_both_and_names_options_that_differ(small: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 12, engines=4, seed=1)
    (other / "config.yaml").write_text("run:\n  train_iters: 4\n")
    text = page(read_run(small), read_run(other))
    outline(text)
    assert text.count("stroke-dasharray") > 5
    assert "<td>train_iters</td><td>3</td><td>4</td>" in text


def test_comparison_says_which_phase_is_slower(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before", 60)
    after = make_run(tmp_path / "after", 60, scale={"train": 1.2})
    text = page(read_run(after), read_run(before))
    outline(text)
    assert "slower: train +20.0 %, step" in text and '<td class="slower">slower</td>' in text
    short = make_run(tmp_path / "short", 2)
    assert "Not compared: " in page(read_run(after), read_run(short))


def test_size_of_a_long_run_of_many_engines(large: Path, small: Path, tmp_path: Path) -> None:
    _, size = write_report(str(large), str(small), str(tmp_path / "report.html"))
    assert size < 5_000_000
    outline((tmp_path / "report.html").read_text())


def test_a_thousand_engines_are_grouped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "wide", 4, engines=1000, slots=4, simulated=2)
    text = page(read_run(run))
    assert len(text) < 5_000_000
    assert "each row is the mean of up to 16 of 1000 engines" in text
    assert "32 of 1000 engines: the most and the least idle ones" in text


def test_nothing_comes_from_the_network(small: Path) -> None:
    text = page(read_run(small))
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(|src=", text)


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", 3)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 3, "reward/<img src=x onerror=alert(1)>": 1.0, "timing_s/<b>": 1.0, "perf/step_time": 1.0}\n'
        )
    (run / "config.yaml").write_text('run:\n  output_dir: "\\"><script>alert(1)</script>"\n')
    text = page(read_run(run))
    outline(text)
    assert "<img" not in text and "<b>" not in text.replace("<b>-</b>", "").replace('<div class="tile"><b>', "")
    assert text.count("<script>") == 1


def test_command_writes_and_says_where(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main([str(small), "-o", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    root = Path(__file__).parents[2]
    words = [sys.executable, "tools/report.py", str(small), "-o", str(target)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("metrics.jsonl", None, "not a run directory: it has no metrics.jsonl"),
        ("metrics.jsonl", "", "holds no step yet"),
        (
            "metrics.jsonl",
            '{"step": 0}\n{"step": 1, "rew\n{"step": 2}\n',
            "metrics.jsonl, line 2: not a line of metrics",
        ),
        (
            "metrics.jsonl",
            '{"step": 0, "loss": NaN}\n',
            "metrics.jsonl, line 1: not a line of metrics: NaN is not JSON",
        ),
        ("metrics.jsonl", '{"step": 0, "loss": 1e999}\n', "metric 'loss' is not finite"),
        ("metrics.jsonl", '{"step": 0, "loss": "low"}\n', "metric 'loss' is not a number: 'low'"),
        ("metrics.jsonl", '{"loss": 1.0}\n', "line 1: not a line of metrics: it has no step"),
        ("metrics.jsonl", "[1, 2]\n", "line 1: not a line of metrics: expected an object, got list"),
        (
            "metrics.jsonl",
            '{"step": 1}\n{"step": 0}\n',
            "line 2: step 0 comes after step 1: lines of more than one run",
        ),
        ("windows.jsonl", '{"step": 0}\n', "windows.jsonl, line 1: not a window record"),
        ("windows.jsonl", "[]\n", "windows.jsonl, line 1: not a window record"),
        ("config.yaml", "a: [", "config.yaml: cannot be read"),
        ("summary.json", "{", "summary.json: cannot be read"),
    ],
)
def test_bad_input_is_one_clear_error(
    file: str, content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "bad", 2)
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    assert main([str(run)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (run / "report.html").exists()


def test_missing_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such run directory" in capsys.readouterr().err


def test_a_last_line_that_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "killed", 5, engines=2)
    for name in ("metrics.jsonl", "windows.jsonl"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[:-40])
    read = read_run(run)
    assert len(read.rows) == len(read.windows) == 4
    assert [note for note in read.notes if "cut off" in note] == [
        "metrics.jsonl: the last line (5) is cut off and left out",
        "windows.jsonl: the last line (5) is cut off and left out",
    ]


def test_spans_are_read_back_from_their_place(large: Path) -> None:
    run = read_run(large)
    lines = (large / "windows.jsonl").read_text().splitlines()
    for at in (0, 500, 999):
        spans = run.full_window(run.windows[at]).spans
        assert len(spans) == run.windows[at].spans == len(json.loads(lines[at])["spans"]) > 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_bins_keep_sum_range_and_order(values: list[float], most: int) -> None:
    y = np.array(values)
    got = charts.binned(np.arange(len(y), dtype=float), y, most)
    assert len(got.x) == min(len(y), most)
    assert (np.diff(got.x) > 0).all()
    assert got.low.min() == y.min() and got.high.max() == y.max()
    if len(y) % most == 0 or len(y) <= most:
        assert got.mean.sum() * len(y) / len(got.x) == pytest.approx(y.sum(), abs=1e-3)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_lie_inside_and_are_few(low: float, span: float) -> None:
    high = low + span
    marks = charts.ticks(low, high)
    slack = 1e-6 * span + 1e-9 * max(abs(low), abs(high))
    assert 0 < len(marks) <= 7
    assert all(low - slack <= mark <= high + slack for mark in marks)
    assert all(b > a for a, b in itertools.pairwise(marks))


def test_engines_that_are_chosen_from_many() -> None:
    idle = np.arange(1000, dtype=np.float64)
    assert chosen_engines(idle, 4) == [0, 1, 998, 999]
    assert chosen_engines(idle[:3], 4) == [0, 1, 2]


@pytest.mark.skipif(
    CHROMIUM is None, reason="needs headless Chromium (Debian: apt-get install chromium-headless-shell)"
)
def test_opens_in_a_browser_without_errors(large: Path, small: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    target, _ = write_report(str(large), str(small), str(tmp_path / "report.html"))
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", target.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr, done.stderr
    assert done.stdout.count('class="tip"') == done.stdout.count("data-hover=") > 5  # the script has run
