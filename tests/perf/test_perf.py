"""The gate: planted slowdowns are found, unchanged repeats raise no alarm, and wrong input is one clear error."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.errors import DataError
from rhymemeg.observe.read_run import read_run
from rhymemeg.perf import compare as comparing
from rhymemeg.perf import statistics, suite, trial
from rhymemeg.perf.command import main
from rhymemeg.perf.measure import MeasurementError, Settings, own_tree
from rhymemeg.perf.measure import run as measure_run
from rhymemeg.perf.result import (
    Measure,
    Result,
    fingerprint,
    machine,
    read_history,
    read_result,
    record,
    write_result,
)
from rhymemeg.perf.runs import phase_times
from rhymemeg.perf.statistics import Rule
from tests.report.runs import PHASES, make_run

REPEATS = Path(__file__).parent / "repeats.json"
RULE = Rule()


def result(seed: int = 0, factor: float = 1.0, name: str = "planner.plan", **changes: Any) -> Result:
    rng = np.random.default_rng(seed)
    measures = [
        Measure(n, n.partition(".")[0], trial._times(trial.steady(5, 25)(rng), factor if n == name else 1.0))
        for n in ("planner.plan", "drafter.draft")
    ]
    made = f"2026-01-01T00:00:{seed:02d}+00:00"
    return dataclasses.replace(Result(measures, machine(), {"numpy": "2"}, {"probes": ["a"]}, made), **changes)


# ----------------------------------------------------------------------------------------------------------- statistics


def test_planted_slowdowns_of_results_are_found_and_nothing_else() -> None:
    outcome = trial.try_results("any", trial.steady(5, 25), 20, RULE)
    assert outcome.false_alarms == 0
    assert outcome.slower[1:] == (20, 20) and outcome.faster == (0, 0, 0)


@pytest.mark.parametrize("kind", ["busy", "crowded"])
def test_no_alarm_on_unchanged_repeats_of_a_real_machine(kind: str) -> None:
    for name, real in trial.read_recorded(str(REPEATS))[kind].items():
        rng = np.random.default_rng(1)
        draw = trial.recorded(real, 5, 25)
        found = [statistics.compare(draw(rng), draw(rng), RULE) for _ in range(20)]
        assert not any(change.moved for change in found), name


@pytest.mark.parametrize("phase", list(trial.PHASES))
def test_a_planted_phase_of_a_run_is_found(phase: str) -> None:
    outcome = trial.try_runs(phase, 200, 4, RULE)
    assert outcome.false_alarms == 0
    assert outcome.slower[1:] == (4, 4)


def test_twenty_unchanged_runs_raise_no_alarm() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        work = 1e6 * rng.lognormal(0, 0.1, 150)
        a, b = (trial.noisy_run(rng, work, {}, 0.03) for _ in range(2))
        assert comparing.compare_runs(a, b, RULE, 2).status("moved") == 0


def test_what_disturbs_both_in_turns_cancels() -> None:
    rng = np.random.default_rng(0)
    shared = np.exp(rng.normal(0, 0.5, (5, 25)))  # a machine that is half as fast at times
    a, b = (shared * np.exp(rng.normal(0, 0.01, shared.shape)) for _ in range(2))
    assert statistics.compare_turns(a.tolist(), b.tolist(), RULE).verdict == "unchanged"
    found = statistics.compare_turns(a.tolist(), (1.05 * b).tolist(), RULE)
    assert found.verdict == "slower" and found.ratio == pytest.approx(1.05, abs=0.01)
    assert statistics.compare(a.tolist(), (1.05 * b).tolist(), RULE).verdict == "noisy"


@settings(max_examples=25)
@given(st.integers(0, 1000), st.floats(1e-6, 1e6), st.sampled_from([0.8, 0.9, 1.0, 1.1, 1.25]))
def test_bands_scale_with_the_reference_and_have_two_sides(seed: int, unit: float, factor: float) -> None:
    draw = trial.steady(4, 12)
    rng = np.random.default_rng(seed)
    a, b = draw(rng), trial._times(draw(rng), factor)
    here = statistics.compare(a, b, RULE)
    there = statistics.compare(trial._times(a, unit), trial._times(b, unit), RULE)
    assert there.ratio == pytest.approx(here.ratio) and there.band == pytest.approx(here.band)
    assert here.verdict == there.verdict == ("slower" if factor > 1 else "faster" if factor < 1 else "unchanged")
    assert here.low <= here.ratio <= here.high and here.band >= RULE.smallest - 1e-9


def test_too_few_and_too_noisy_are_said_and_no_alarm() -> None:
    assert statistics.compare([[1.0, 1.1]], [[2.0, 2.1]], RULE).verdict == "too few"
    rng = np.random.default_rng(0)
    wild = np.exp(rng.normal(0, 1, (3, 5)))
    assert statistics.compare(wild.tolist(), (1.05 * wild[::-1]).tolist(), RULE).verdict == "noisy"


def test_spread_between_kept_results_widens_the_band() -> None:
    draw = trial.steady(5, 25)
    rng = np.random.default_rng(0)
    runs = [trial._times(draw(rng), float(f)) for f in np.exp(rng.normal(0, 0.05, 8))]
    spread = statistics.between_runs(runs)
    assert 0.02 < spread < 0.12 and statistics.between_runs(runs[:2]) == 0
    now = trial._times(draw(rng), 1.08)
    assert statistics.compare(draw(rng), now, RULE).verdict == "slower"
    assert not statistics.compare([r for run in runs for r in run], now, RULE, between_runs=spread).moved


# ------------------------------------------------------------------------------------------------------ results and runs


def test_a_result_is_read_back(tmp_path: Path) -> None:
    one = result()
    write_result(tmp_path / "new" / "a.json", one)
    assert dataclasses.replace(read_result(tmp_path / "new" / "a.json"), source="") == one


def test_a_history_holds_results_of_one_machine_and_suite(tmp_path: Path) -> None:
    for seed in range(4):
        record(tmp_path, result(seed))
    record(tmp_path, result(7, settings={"probes": ["b"]}))
    record(tmp_path, result(8, machine=machine() | {"cpu": "another"}))
    new = result(9)
    assert len(read_history(tmp_path, new)) == 4
    with pytest.raises(DataError, match="no result of this machine and these settings"):
        read_history(tmp_path, result(settings={"probes": ["c"]}))


def test_the_driver_may_change_within_a_history_and_is_said() -> None:
    facts = machine()
    old, new = facts | {"gpus": ["H100 (driver 1)"]}, facts | {"gpus": ["H100 (driver 2)"]}
    assert fingerprint(old) == fingerprint(new) != fingerprint(facts)
    found = comparing.compare_results([result(machine=old)], result(1, machine=new), RULE)
    assert any("driver 1" in note and "driver 2" in note for note in found.notes)


def test_other_machines_settings_and_versions() -> None:
    other = result(1, machine=machine() | {"cpu": "another"})
    with pytest.raises(DataError, match="different machines"):
        comparing.compare_results([result()], other, RULE)
    with pytest.raises(DataError, match="--across-machines needs"):
        comparing.compare_results([result()], other, RULE, across_machines=True)
    with pytest.raises(DataError, match="different settings"):
        comparing.compare_results([result()], result(1, settings={"probes": ["b"]}), RULE)
    newer = comparing.compare_results([result()], result(1, versions={"numpy": "3"}), RULE)
    assert newer.notes == ["numpy 2 then, 3 now"]


def test_which_measure_moved_is_said_in_every_form() -> None:
    found = comparing.compare_results([result()], result(1, 1.1), RULE)
    assert [line.name for line in found.slower] == ["planner.plan"] and not found.faster
    assert found.status("slower") == 1
    assert comparing.verdict(found).startswith("slower: planner.plan +")
    assert "**slower**" in comparing.markdown(found) and "slower" in comparing.text(found)
    read = json.loads(comparing.as_json(found))
    assert read["slower"] == ["planner.plan"] and read["lines"][0]["change"]["verdict"] == "slower"
    faster = comparing.compare_results([result(1, 1.1)], result(), RULE)
    assert (faster.status("slower"), faster.status("moved")) == (0, 1)


def test_times_of_a_run_are_for_the_work_it_had(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", 30))
    phases = {p.name: p for p in phase_times(run)}
    assert phases["rollout"].unit == "generated token" and phases["sync"].unit == "step"
    _, seconds = run.series("timing_s/rollout")
    _, tokens = run.series("rollout/tokens")
    np.testing.assert_allclose(phases["rollout"].seconds, (seconds / tokens)[2:])
    total = sum(p.mean_seconds for p in phases.values() if p.name != "step")
    assert total == pytest.approx(phases["step"].mean_seconds)


def test_runs_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", 120)
    same = make_run(tmp_path / "same", 120, seed=0)
    slow = make_run(tmp_path / "slow", 120, seed=0, scale={"train": 1.1})
    assert main(["compare", str(a), str(same)]) == 0
    capsys.readouterr()
    files = [tmp_path / "out.json", tmp_path / "out.md"]
    assert main(["compare", str(a), str(slow), "--json", str(files[0]), "--markdown", str(files[1])]) == 1
    said = capsys.readouterr().out
    assert "slower: train +10.0 %, step" in said
    assert "train" in json.loads(files[0].read_text())["slower"] and "| train |" in files[1].read_text()
    share = PHASES["train"] / sum(PHASES.values())
    train = next(line for line in json.loads(files[0].read_text())["lines"] if line["name"] == "train")
    assert train["points"] == pytest.approx(0.1 * share, rel=0.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare", "nowhere", "nowhere"], "nowhere: no such result or run directory"),
        (["compare", "{a}"], "compare needs two results or two run directories"),
        (["compare", "{a}", "{run}"], "one is a run directory and the other a result"),
        (["compare", "{half}", "{a}"], "half.json: not a result of rhymemeg perf"),
        (["compare", "{schema}", "{a}"], "schema 'rhymemeg.perf/9', expected 'rhymemeg.perf/1'"),
        (["compare", "{nan}", "{a}"], "nan.json: not a result of rhymemeg perf: NaN is not a time"),
        (["compare", "{negative}", "{a}"], "a round without times, or one that is not a positive number"),
        (["compare", "{a}", "{b}", "--smallest", "0"], "--smallest must be greater than 0"),
        (["compare", "{a}", "--history", "{run}/none"], "no such folder"),
        (["compare", "{run}", "{run}", "--skip", "500"], "no step with times after the first 500"),
        (["compare", "{cut}", "{run}"], "line 2: not a line of metrics"),
        (["run", "--suite", "plannner"], "--suite: unknown probe or group 'plannner', did you mean planner?"),
        (["run", "--rounds", "0"], "--rounds must be at least 1"),
        (["run", "--against", "{run}"], "no source tree with rhymemeg/perf"),
        (["run", "--suite", "model", "--model", "nowhere"], "--model nowhere: no such folder"),
        (["record", "{half}"], "half.json: not a result"),
    ],
)
def test_wrong_input_is_one_clear_error(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(tmp_path / "a.json", result())
    write_result(tmp_path / "b.json", result(1))
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    (tmp_path / "schema.json").write_text(text.replace("rhymemeg.perf/1", "rhymemeg.perf/9"))
    first = json.loads(text)["measures"][0]["rounds"][0][0]
    (tmp_path / "nan.json").write_text(text.replace(repr(first), "NaN", 1))
    (tmp_path / "negative.json").write_text(text.replace(repr(first), "-1.0", 1))
    run, cut = make_run(tmp_path / "run", 10), make_run(tmp_path / "cut", 10)
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    (cut / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:50], *lines[2:]]) + "\n")
    places = {n: str(tmp_path / f"{n}.json") for n in ("a", "b", "half", "schema", "nan", "negative")}
    places |= {"run": str(run), "cut": str(cut)}
    assert main([word.format(**places) for word in words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------ measuring


def test_what_can_be_chosen() -> None:
    assert suite.choose(["quick"]) == {"quick": ["drafter", "planner", "sync_plan", "batching"]}
    assert suite.choose(["sync"]) == {"model": ["rollout", "sync"]}  # the engine that it pushes into
    assert set(suite.choose(["all"])) == {"quick", "model", "step"}
    measures = [name for probe in suite.PROBES for name in probe.measures]
    assert len(measures) == len(set(measures))


def test_two_trees_are_measured_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    settings_ = Settings({"quick": ["planner", "batching"]}, rounds=2, repeats=3, timeout=240)
    a, b = measure_run(settings_, [own_tree(), own_tree()])
    assert a.interleaved == b.interleaved != ""
    for one in (a, b):
        assert {m.name for m in one.measures} == {"planner.plan", "batching.plan"}
        for m in one.measures:
            assert [len(r) for r in m.rounds] == [len(r) for r in m.reference_rounds] == [3, 3]
            assert all(math.isfinite(s) and s > 0 for r in m.rounds for s in r)
    found = comparing.compare_results([a], b, RULE)
    assert all("in turns" in line.how for line in found.lines)


def test_a_process_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rhymemeg" / "perf"
    folder.mkdir(parents=True)
    for part in (tmp_path / "rhymemeg", folder):
        (part / "__init__.py").write_text("")
    (folder / "worker.py").write_text("raise RuntimeError('no index')\n")
    settings_ = Settings({"quick": ["planner"]}, rounds=1, repeats=1, timeout=60)
    with pytest.raises(MeasurementError, match=r"group 'quick' in .* failed with status 1: RuntimeError: no index"):
        measure_run(settings_, [tmp_path])
    (folder / "worker.py").write_text("import time; time.sleep(60)\n")
    settings_ = dataclasses.replace(settings_, timeout=0.5)
    with pytest.raises(MeasurementError, match=r"did not answer in 0.5 s \(--timeout\)"):
        measure_run(settings_, [tmp_path])


def test_speed_of_the_machine_is_measured() -> None:
    context = suite.context_for("")
    assert 0 < suite.machine_speed(context.clock) < 60 and context.clock_name == "cpu"


@pytest.mark.engine
def test_model_probes_run() -> None:
    settings_ = Settings(suite.choose(["model"]), rounds=1, repeats=1, timeout=400)
    (found,) = measure_run(settings_, [own_tree()])
    assert {m.name for m in found.measures} == {"rollout.plain", "rollout.drafted", "train.step", "sync.push"}


@pytest.mark.engine
@pytest.mark.distributed
def test_whole_steps_run() -> None:
    (found,) = measure_run(Settings({"step": ["step"]}, rounds=1, steps=2, timeout=400), [own_tree()])
    assert {"step.whole", "step.rollout", "step.train"} <= {m.name for m in found.measures}
    assert all(len(m.rounds[0]) == 2 for m in found.measures)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": {"gpus": 3}}, "gpus of the machine are not a list"),
        ({"machine": []}, "not a result of rhymemeg perf"),
        ({"measures": 3}, "not a result of rhymemeg perf"),
    ],
)
def test_a_result_of_the_wrong_kind_is_named(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    file = tmp_path / "now.json"
    file.write_text(json.dumps(json.loads(Result([], {}, {}).to_json()) | changes))
    with pytest.raises(DataError, match=says):
        read_result(file)
    file.write_text("[" * 100_000)
    with pytest.raises(DataError, match="not a result of rhymemeg perf"):
        read_result(file)


def test_a_result_is_kept_inside_its_history_whatever_it_says(tmp_path: Path) -> None:
    kept = record(tmp_path / "perf", Result([], {}, {}, made="../../../x/y" * 50))
    assert kept.parent == tmp_path / "perf" and kept.is_file() and [*tmp_path.iterdir()] == [tmp_path / "perf"]


@pytest.mark.parametrize("words", [["run", "--timeout", "nan"], ["compare", "tests", "tests", "--skip", "-1"]])
def test_numbers_out_of_range_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert words[-2] in capsys.readouterr().err
