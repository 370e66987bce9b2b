"""windows.jsonl, figures, traces, and the simulator's command line."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from rhymemeg.errors import ConfigError, DataError
from rhymemeg.histopipe import figures, simulate
from rhymemeg.histopipe.record import Span, WindowRecord, append_window, read_windows
from rhymemeg.histopipe.workloads import Lognormal, degrade, read_trace, workload


def record(step=3, **changes):
    values = dict(
        step=step,
        policy="complement",
        layout="spread",
        num_engines=2,
        seconds=10.0,
        idle_seconds=(0.0, 1.0),
        samples=4,
        tokens=100,
        generated_tokens=110,
        stale_tokens=5,
        recomputed_tokens=11,
        mean_length=25.0,
        mean_length_started=26.0,
        carried_in=1,
        carried_out=2,
        max_unfinished=3,
        early_started=0,
        stolen=1,
        migrated=0,
        growth=1.1,
        prediction_error=float("nan"),
        rank_correlation=0.8,
        engine_steps=(10, 8),
        idle_steps=(0, 2),
        spans=(Span(0, "3-7-0", 0.0, 4.0, 9, "new", "finished"), Span(0, "3-8-1", 4.0, 10.0, 6, "resumed", "carried")),
    )
    return WindowRecord(**(values | changes))


def test_records_survive_the_file_and_a_cut_last_line(tmp_path):
    file = tmp_path / "windows.jsonl"
    for step in (1, 2):
        append_window(file, record(step))
    with open(file, "a") as f:
        f.write(record(3).to_json()[:50])
    back = read_windows(file)
    assert [r.to_json() for r in back] == [record(1).to_json(), record(2).to_json()]
    assert back[0].spans == record().spans and np.isnan(back[0].prediction_error)


def test_broken_records_are_named(tmp_path):
    file = tmp_path / "windows.jsonl"
    file.write_text('{"step": 1}\n' + record().to_json() + "\n")
    with pytest.raises(DataError, match=r"windows\.jsonl, line 1"):
        read_windows(file)
    with pytest.raises(DataError, match=r"none\.jsonl"):
        read_windows(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "line",
    [b"[]", b"null", b"\xff\xfe", b"[" * 100_000]
    + [
        json.dumps(json.loads(record().to_json()) | changes).encode()
        for changes in (
            {"num_engines": "x"},
            {"seconds": "x"},
            {"seconds": None},
            {"spans": [["a"] * 7]},
            {"spans": [[0, "a", 0, 1, 1, "other", "finished"]]},
        )
    ],
)
def test_a_record_of_the_wrong_kind_is_named(tmp_path, line):
    (tmp_path / "windows.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DataError, match=r"windows\.jsonl, line 1: not a window record"):
        read_windows(tmp_path / "windows.jsonl")


def test_metrics():
    m = record().metrics()
    assert m["histopipe/idle_share"] == pytest.approx(0.05) and m["histopipe/idle_share_max"] == pytest.approx(0.1)
    assert m["histopipe/step_idle_share"] == pytest.approx(2 / 20)
    assert m["histopipe/stale_token_share"] == pytest.approx(0.05)
    assert m["histopipe/recomputed_token_share"] == pytest.approx(0.1)
    assert "histopipe/prediction_error" not in m, "what is not known is not logged"


def test_lanes_hold_one_span_at_a_time():
    spans = [Span(0, "a", 0, 5, 1, "new", "finished"), Span(0, "b", 1, 3, 1, "new", "finished")]
    spans += [Span(0, "c", 3, 9, 1, "new", "carried"), Span(4, "d", 0, 9, 1, "new", "finished")]
    assert figures.lanes(record(spans=tuple(spans))) == [(0, 0, 2), (0, 1, 2), (0, 1, 2), (1, 0, 1)]


def test_gantt_chart_of_a_file(tmp_path, capsys):
    append_window(tmp_path / "w.jsonl", record())
    assert figures.main([str(tmp_path / "w.jsonl"), "--output", str(tmp_path / "w.png")]) == 0
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    assert figures.main([str(tmp_path / "w.jsonl"), "--step", "9"]) == 1
    assert "no window of step 9" in capsys.readouterr().err


def write_trace(path, lines):
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def trace_lines():
    for step in (1, 2):
        for prompt in (0, 1):
            yield {"step": step, "prompt_id": prompt, "output": "two words! " * prompt + "end", "score": 1}


def test_trace_lengths_come_from_the_best_field(tmp_path):
    trace = read_trace(write_trace(tmp_path / "t.jsonl.gz", trace_lines()), scale=8)
    assert [{p: v.tolist() for p, v in epoch.items()} for epoch in trace.epochs] == [{0: [8], 1: [32]}] * 2
    exact = write_trace(
        tmp_path / "s.jsonl", [{"step": 1, "prompt_id": 0, "output": "x y", "output_token_ids": [1] * 5}]
    )
    assert read_trace(exact).epochs[0][0].tolist() == [5]
    counted = write_trace(tmp_path / "s.jsonl", [{"step": 1, "prompt_id": 0, "length": 7, "output_token_ids": [1]}])
    assert read_trace(counted).epochs[0][0].tolist() == [7]
    folder = tmp_path / "samples"
    folder.mkdir()
    for step in (1, 2):
        write_trace(folder / f"step_{step}.jsonl", [line for line in trace_lines() if line["step"] == step])
    assert len(read_trace(folder).epochs) == 2


def test_trace_steps_take_history_from_one_step_and_responses_from_the_next(tmp_path):
    lines = [{"step": s, "prompt_id": p, "length": 100 * s + p} for s in (1, 2) for p in (1, 2)]
    step = next(read_trace(write_trace(tmp_path / "t.jsonl", lines)).steps(4, 3, 1000, 0))
    assert (step.history // 100 == 1).all() and (step.actual // 100 == 2).all()
    assert (step.history % 100 == step.actual % 100).all(), "of the same prompt"
    assert sorted(step.actual[:, 0].tolist()) == [201, 201, 202, 202], "each prompt equally often"


def test_bad_traces_are_named(tmp_path):
    with pytest.raises(DataError, match="line 1"):
        read_trace(write_trace(tmp_path / "t.jsonl", [{"step": 1}]))
    for content in (b"\xff\xfe", b"[" * 100_000, b'{"step": 1, "prompt_id": 0, "length": -5}'):
        (tmp_path / "b.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"b\.jsonl, line"):
            read_trace(tmp_path / "b.jsonl")
    (tmp_path / "cut.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(DataError, match=r"cut\.gz: cannot be read"):
        read_trace(tmp_path / "cut.gz")
    with pytest.raises(ConfigError, match="--lengths"):
        workload(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="--lengths"):
        workload("lognormal:sigma=-1")
    one = read_trace(write_trace(tmp_path / "o.jsonl", [{"step": 1, "prompt_id": 0, "length": 3}]))
    with pytest.raises(DataError, match="responses at two steps"):
        next(one.steps(1, 1, 10, 0))


def test_lognormal_has_the_stated_shape():
    step = next(Lognormal(1160).steps(4000, 4, 10**6, 0))
    logs = np.log(step.history)
    assert np.exp(np.median(logs)) == pytest.approx(1160, rel=0.15)
    assert logs.std() == pytest.approx(0.99, rel=0.05)
    within = logs.var(axis=1, ddof=1).mean() / logs.var()
    assert within == pytest.approx(0.26, abs=0.03), "the share of sampling noise"


def test_degraded_histories():
    step = next(Lognormal(1000).steps(50, 4, 10**6, 0))
    truth = np.argsort(step.actual.mean(axis=1))
    turned = degrade(step, "adversarial", 0).history.mean(axis=1)[truth]
    assert (np.diff(turned) <= 0).all()
    assert np.isnan(degrade(step, "none", 0).history).all()
    assert sorted(degrade(step, "shuffled", 0).history.ravel()) == sorted(step.history.ravel())


def test_command_line_writes_everything(tmp_path, capsys):
    out = {name: str(tmp_path / name) for name in ("a.json", "a.png", "w.jsonl")}
    arguments = ["--engines", "2", "--prompts", "4", "--samples", "4", "--windows", "2", "--warmup", "1"]
    arguments += ["--cap", "3000", "--explain"]
    arguments += ["--settings", "random", "paper", "pull-early", "complement:carry=0.1,layout=group"]
    arguments += ["--json", out["a.json"], "--plot", out["a.png"], "--windows-file", out["w.jsonl"]]
    assert simulate.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "complement:carry=0.1,layout=group" in printed and "engine 0:" in printed
    numbers = json.loads((tmp_path / "a.json").read_text())["settings"]
    assert numbers[0]["name"] == "random" and numbers[0]["speed"] == 1
    assert all(s["bound_ratio"] >= 0.99 for s in numbers if s["name"] == "random")
    assert len(read_windows(out["w.jsonl"])) == 2 and read_windows(out["w.jsonl"])[0].spans
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_strict_windows_are_never_shorter_than_the_bound():
    from rhymemeg.histopipe.simulator import Setting

    for engines, slots in ((1, 1), (2, 8), (5, 64)):
        setting = Setting(engines=engines, slots=slots, samples=4, cap=4000)
        _, records, longest = simulate.run_setting(setting, Lognormal(500), "epoch", 6, 3, 0, 0)
        for one, length in zip(records, longest):
            assert one.seconds >= max(simulate.bounds(setting, [one], [length])) * 0.999


@pytest.mark.parametrize(
    "arguments",
    [
        ["--engines", "0"],
        ["--settings", "fastest"],
        ["--settings", "complement:speed=9"],
        ["--settings", "complement:carry=x"],
        ["--settings", "complement:samples=0"],
        ["--carry", "nan"],
        ["--seed", "-1"],
        ["--length-scale", "nan"],
        ["--prompt-tokens", "-1"],
        ["--lengths", "lognormal:sigma=inf"],
        ["--speculation", "1000000000000000000000:0.5"],
        ["--speculation", "4"],
        ["--speculation", "4:2"],
        ["--lengths", "gamma"],
        ["--cost", "nowhere.json"],
    ],
)
def test_bad_options_are_one_line_that_names_them(arguments, capsys):
    assert simulate.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert arguments[0].strip("-") in error or arguments[1] in error


def test_visits_of_a_run_whose_epochs_take_several_steps(tmp_path):
    """Prompts 0 and 1 come in steps 0 and 2, prompt 2 in steps 1 and 3: two visits of each, three prompts an epoch."""
    lines = [(0, 0, 10), (0, 1, 20), (1, 2, 30), (2, 0, 11), (2, 1, 21), (3, 2, 31)]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps({"step": s, "prompt_id": p, "length": n}) + "\n" for s, p, n in lines))
    trace = read_trace(file)
    assert [{p: v.tolist() for p, v in epoch.items()} for epoch in trace.epochs] == [
        {0: [10.0], 1: [20.0], 2: [30.0]},
        {0: [11.0], 1: [21.0], 2: [31.0]},
    ]
