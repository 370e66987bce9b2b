"""The page about a run: sections in the order in which questions come up. Pure: `RunData` in, HTML out.

Does it learn, and what does a step cost; where does the time go; what do the engines do; does drafting pay; does the
weight update keep trainer and engines equal. A section without data is left out, or says what is missing. With a second
run its lines are dashed in the same charts, and a table says which phase moved (`rhymemeg.perf.compare`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rhymemeg.errors import DataError
from rhymemeg.observe.read_run import Floats, Line, RunData
from rhymemeg.report import engines
from rhymemeg.report.charts import Series, escape, line_chart, number, stack_chart

STYLE = """
:root{--ink:#1c2430;--dim:#5d6875;--paper:#fff;--card:#f7f9fb;--line:#d8dee6}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--dim:#98a4b3;--paper:#14181d;--card:#1c2229;--line:#333c47}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1400px;padding:24px;font:14px/1.45 system-ui,sans-serif;color:var(--ink);
background:var(--paper)}h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 10px;border-bottom:1px solid var(--line);
padding-bottom:4px}p{margin:4px 0}.dim,.note{color:var(--dim)}.note{font-size:12px}.grid{display:grid;gap:14px;
grid-template-columns:repeat(auto-fit,minmax(420px,1fr))}figure{margin:0;padding:10px 12px;background:var(--card);
border:1px solid var(--line);border-radius:6px;min-width:0;position:relative}figure.wide{grid-column:1/-1}figcaption{
font-weight:600}.legend{font-size:12px;color:var(--dim);min-height:17px}.key{margin-right:12px;white-space:nowrap}.key i{
display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:4px}svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}.grid path.grid,path.grid{stroke:var(--line);stroke-width:.7;fill:none}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}.tile{background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:8px 14px}.tile b{display:block;font-size:18px}.tile span{font-size:12px;color:var(--dim)}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid
var(--line)}td:first-child,th:first-child{text-align:left}th{font-weight:600;color:var(--dim)}.bar{display:inline-block;
height:9px;background:#0072b2;border-radius:2px}.tip{position:absolute;pointer-events:none;background:var(--ink);
color:var(--paper);font-size:12px;padding:4px 8px;border-radius:4px;white-space:nowrap;display:none;z-index:2}
.slower{color:#d03a2b;font-weight:600}.faster{color:#1f8a4c;font-weight:600}details{margin:8px 0}summary{cursor:pointer}
""".replace("\n", " ")

# Reads the numbers of a chart from its own attribute and shows those under the pointer.
SCRIPT = """
document.querySelectorAll('svg[data-hover]').forEach(function(s){
 var d=JSON.parse(s.dataset.hover),f=s.closest('figure'),t=document.createElement('div');t.className='tip';f.appendChild(t);
 s.addEventListener('mousemove',function(e){var b=s.getBoundingClientRect(),w=s.viewBox.baseVal.width,
  x=(e.clientX-b.left)/b.width*w,rows=[],head=null;d.forEach(function(o){var k=0;for(var i=1;i<o.p.length;i++)
  if(Math.abs(o.p[i]-x)<Math.abs(o.p[k]-x))k=i;if(head===null)head=o.x[k];rows.push(o.n+': '+o.y[k]);});
  t.textContent='';[['step '+head]].concat(rows).forEach(function(r){var p=document.createElement('div');p.textContent=r;
  t.appendChild(p);});t.style.display='block';var g=f.getBoundingClientRect(),left=e.clientX-g.left+14;
  if(left+t.offsetWidth>g.width)left-=t.offsetWidth+28;t.style.left=left+'px';t.style.top=(e.clientY-g.top+10)+'px';});
 s.addEventListener('mouseleave',function(){t.style.display='none';});});
"""


def page(run: RunData, other: RunData | None = None) -> str:
    """The whole document."""
    sections = [
        _tiles(run, other),
        _section("Learning", _learning(run, other)),
        _section("Where the time goes", _time(run, other)),
        _section("Engines", _engines(run, other)),
        _section("Drafting from history", _speculation(run, other)),
        _section("Weights", _weights(run, other)),
        _section("GPU", _gpu(run, other)),
        _comparison(run, other),
        _options(run, other),
    ]
    title = f"RhymeMeg: {run.name}" + (f" against {other.name}" if other else "")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{''.join(sections)}<script>{SCRIPT}</script></body></html>\n"
    )


def _section(title: str, parts: Sequence[str]) -> str:
    body = "".join(part for part in parts if part)
    return f'<h2>{escape(title)}</h2><div class="grid">{body}</div>' if body else ""


def _both(run: RunData, other: RunData | None, name: str, label: str) -> list[Series]:
    """A metric of the run and, dashed, of the one compared with."""
    series = [Series(label, *run.series(name))]
    if other is not None:
        series.append(Series(label, *other.series(name), dashed=True))
    return [s for s in series if len(s.x)]


def _chart(
    run: RunData,
    other: RunData | None,
    title: str,
    metrics: dict[str, str],
    *,
    zero: bool = False,
    log: bool = False,
    note: str = "",
) -> str:
    """One chart of several metrics, {name: label}."""
    series = [s for name, label in metrics.items() for s in _both(run, other, name, label)]
    return line_chart(title, series, zero=zero, log=log, note=note)


def _tiles(run: RunData, other: RunData | None) -> str:
    def ends(name: str, most: int) -> str:
        _, values = run.series(name)
        if not len(values):
            return "-"
        return f"{values[:most].mean():.3f} → {values[-most:].mean():.3f}"

    seconds, tokens = run.series("perf/step_time")[1], run.series("rollout/tokens")[1]
    idle = run.series("histopipe/idle_share")[1]
    idle = idle if len(idle) else run.series("rollout/idle_share")[1]
    tiles = [
        ("steps", f"{len(seconds)}"),
        ("reward, first and last 5 steps", ends("reward/mean", 5)),
        ("held-out reward, first and last", ends("eval/reward", 1)),
        ("seconds of all steps", number(float(seconds.sum()))),
        ("tokens generated", number(float(tokens.sum()))),
        ("tokens/s a rank, median", number(_median(run, "perf/tokens_per_gpu_per_sec"))),
        ("idle share of engines, mean", f"{100 * idle.mean():.1f} %" if len(idle) else "-"),
    ]
    if len(run.series("perf/mfu")[1]):
        tiles.append(("MFU of training, median", f"{100 * _median(run, 'perf/mfu'):.1f} %"))
    model = run.option("hf_checkpoint")
    status = run.summary.get("status")
    lines = [f"{run.path}"]
    lines += [f"model {model}"] if model else []
    lines += [f"status: {status}"] if status else []
    lines += run.notes
    if other is not None:
        lines.append(f"compared with {other.path}")
        lines += [f"{other.name}: {note}" for note in other.notes]
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in tiles
    )
    return f'<p class="dim">{" · ".join(map(escape, lines))}</p><div class="tiles">{shown}</div>'


def _median(run: RunData, name: str) -> float:
    values = run.series(name)[1]
    return float(np.median(values)) if len(values) else float("nan")


def _learning(run: RunData, other: RunData | None) -> list[str]:
    held_out = []
    for one in (run, other) if other else (run,):
        x, y = one.series("eval/reward")
        ex, error = one.series("eval/reward_se")
        if len(x):
            bars = error if len(ex) == len(x) and np.array_equal(ex, x) else None
            held_out.append(Series("held-out reward", x, y, bars, one is other, True))
    components = {
        name: name.removeprefix("reward/")
        for name in run.names("reward/")
        if name not in ("reward/mean", "reward/std", "reward/min", "reward/max", "reward/equal_groups")
    }
    return [
        line_chart("Reward", _both(run, other, "reward/mean", "mean reward")),
        line_chart("Held-out reward", held_out, note="bars: one standard error over prompts"),
        _chart(run, other, "Parts of the reward", components),
        _chart(
            run,
            other,
            "Response length in tokens",
            {f"rollout/response_len_{k}": k for k in ("mean", "median", "p90", "max")},
            zero=True,
        ),
        _chart(run, other, "Shares of samples", {
            "rollout/truncated": "truncated", "reward/equal_groups": "groups with equal rewards"}, zero=True),
        _chart(run, other, "Entropy", {"actor/entropy": "entropy"}, zero=True),
        _chart(run, other, "Gradient norm", {"actor/grad_norm": "gradient norm"}, log=True),
        _chart(run, other, "Policy", {"actor/pg_clipfrac": "share clipped", "actor/ppo_kl": "KL to the old policy"}),
    ]  # fmt: skip


def phase_layers(run: RunData) -> tuple[Floats, dict[str, Floats]]:
    """Steps, and seconds of every phase in each (0 where a step has no such phase), the longest phase first."""
    rows = [row for row in run.rows if "perf/step_time" in row]
    steps = np.array([row["step"] for row in rows])
    table = {
        name.removeprefix("timing_s/"): np.array([row.get(name, 0.0) for row in rows])
        for name in run.names("timing_s/")
    }
    return steps, dict(sorted(table.items(), key=lambda item: -item[1].sum()))


def _time(run: RunData, other: RunData | None) -> list[str]:
    steps, layers = phase_layers(run)
    total = sum(float(values.sum()) for values in layers.values()) or 1.0
    rows = []
    for name, values in layers.items():
        share = float(values.sum()) / total
        present = values[values > 0]
        cells = [
            escape(name),
            f"{values.sum():.1f}",
            f'{100 * share:.1f} % <i class="bar" style="width:{max(120 * share, 1):.0f}px"></i>',
            *(f"{np.percentile(present, q):.3g}" if len(present) else "-" for q in (50, 90, 100)),
            str(len(present)),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{h}</th>" for h in ("phase", "seconds", "share", "median", "90 %", "most", "steps"))
    table = f"<figure><figcaption>Seconds by phase</figcaption><table><tr>{head}</tr>{''.join(rows)}</table></figure>"
    most = dict(list(layers.items())[:7])
    rest = list(layers.items())[7:]
    if rest:
        most[f"{len(rest)} more"] = np.sum([values for _, values in rest], axis=0)
    return [
        stack_chart("Seconds of a step by phase", steps, most),
        table if rows else "",
        _chart(run, other, "Tokens a second", {
            "perf/rollout_tokens_per_sec": "generated, in the rollout",
            "perf/tokens_per_gpu_per_sec": "prompt and response, a rank, whole step"}, zero=True),
        _chart(run, other, "Seconds of a step", {"perf/step_time": "step"}, zero=True),
        _chart(run, other, "Model FLOPs utilisation of training", {"perf/mfu": "MFU"}, zero=True),
        _chart(run, other, "Model TFLOP/s a rank in training", {"perf/train_tflops_per_gpu": "TFLOP/s"}, zero=True),
    ]  # fmt: skip


def detailed_windows(run: RunData) -> list[tuple[str, Line]]:
    """The windows that are drawn in full: the last one, and the one with the largest idle share."""
    known = [line for line in run.windows if line.spans]
    if not known:
        return []
    last = known[-1]
    worst = max(known, key=lambda line: line.record.idle_share)
    chosen = [(f"Window of step {last.record.step}, the last", last)]
    if worst is not last:
        chosen.append((f"Window of step {worst.record.step}, the one with most idle time", worst))
    return chosen


def _engines(run: RunData, other: RunData | None) -> list[str]:
    parts = [
        _chart(run, other, "Idle share of engines in the rollout", {
            "histopipe/idle_share": "mean of engines", "histopipe/idle_share_max": "most idle engine",
            "histopipe/step_idle_share": "counted in engine steps",
            "rollout/idle_share": "mean of engines, rollout until the last is done",
            "rollout/idle_step_share": "counted in engine steps, until the last is done"}, zero=True),
        _chart(run, other, "Engine steps of all engines", {"rollout/engine_steps": "engine steps"}, zero=True),
        _chart(run, other, "Responses that cross a window's end", {
            "histopipe/carried_in": "carried in", "histopipe/carried_out": "carried out",
            "histopipe/early_started": "started early", "histopipe/stolen": "stolen",
            "histopipe/migrated": "migrated"}, zero=True),
        _chart(run, other, "Tokens of older weights, recomputed tokens", {
            "histopipe/stale_token_share": "stale share", "histopipe/recomputed_token_share": "recomputed share"}, zero=True),
        _chart(run, other, "Prediction of lengths", {
            "histopipe/prediction_error": "mean error, relative", "histopipe/rank_correlation": "rank correlation"}),
        _chart(run, other, "Mean length, trained against started", {
            "histopipe/mean_length": "trained", "histopipe/mean_length_started": "started"}, zero=True),
        engines.idle_map(run),
        engines.timeline(run),
    ]  # fmt: skip
    parts += [engines.gantt(run.full_window(line), title) for title, line in detailed_windows(run)]
    if not run.windows:
        missing = '<p class="note">No windows.jsonl in this run: no chart of engines over windows.</p>'
        parts.append(missing if any(parts) else "")
    return parts


def _speculation(run: RunData, other: RunData | None) -> list[str]:
    parts = [
        _chart(run, other, "Drafts", {
            "histospec/acceptance": "accepted share of drafted tokens",
            "histospec/coverage": "share of request-steps with a draft"}, zero=True),
        _chart(run, other, "Tokens a request-step", {
            "histospec/tokens_per_request_step": "tokens (1 without drafts)"}, zero=True),
        _chart(run, other, "Microseconds of drafting a request-step", {
            "histospec/draft_us_per_request": "microseconds"}, zero=True),
        _chart(run, other, "Bytes of history", {"histospec/history_bytes": "bytes"}, zero=True),
    ]  # fmt: skip
    if not run.names("histospec/"):
        return ['<p class="note">This run did not draft from history.</p>', *parts] if any(parts) else []
    return parts


def _weights(run: RunData, other: RunData | None) -> list[str]:
    seconds = {name: name.removeprefix("sync/seconds_") for name in run.names("sync/seconds_")}
    return [
        _chart(run, other, "Log-probabilities, trainer against engine", {
            "actor/train_rollout_logprob_abs_diff": "mean difference",
            "actor/train_rollout_logprob_abs_diff_max": "largest difference"}, log=True,
            note="the same tokens under the same weights; a broken weight update would show here"),
        _chart(run, other, "Seconds of a weight update", {"timing_s/sync": "whole phase", **seconds}, zero=True),
        _chart(run, other, "Bytes of a weight update, rank 0", {
            "sync/bytes_sent": "sent", "sync/bytes_received": "received"}, zero=True),
    ]  # fmt: skip


def _gpu(run: RunData, other: RunData | None) -> list[str]:
    return [
        _chart(run, other, "Utilisation", {"gpu/utilization": "mean share of time with a kernel"}, zero=True),
        _chart(run, other, "Memory, GiB", {"gpu/memory_used_gib": "most of any GPU"}, zero=True),
        _chart(run, other, "Power, watts a GPU", {"gpu/power_w": "mean"}, zero=True),
        _chart(run, other, "Energy of a step, all GPUs", {"gpu/energy_j": "joules"}, zero=True),
    ]


def _comparison(run: RunData, other: RunData | None) -> str:
    """Which phase is slower or faster than in the run compared with, as `rhymemeg perf compare` says."""
    if other is None:
        return ""
    from rhymemeg.perf import compare
    from rhymemeg.perf.runs import SKIP
    from rhymemeg.perf.statistics import Rule

    head = "<h2>Speed against the compared run</h2>"
    try:
        found = compare.compare_runs(other, run, Rule(), SKIP)
    except DataError as error:
        return f'{head}<p class="note">Not compared: {escape(error)}</p>'
    names = "".join(f"<th>{escape(name)}</th>" for name in compare.HEAD)
    rows = []
    for cells in compare.rows(found):
        marks = [f' class="{cell}"' if i == 6 and cell in ("slower", "faster") else "" for i, cell in enumerate(cells)]
        rows.append("<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, cells)) + "</tr>")
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in found.notes)
    return f"{head}<p>{escape(compare.verdict(found))}</p><table><tr>{names}</tr>{''.join(rows)}</table>{notes}"


def _flat(config: dict) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in config.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _options(run: RunData, other: RunData | None) -> str:
    if not run.config:
        return ""
    mine = _flat(run.config)
    parts = []
    if other is not None and other.config:
        theirs = _flat(other.config)
        different = [n for n in dict.fromkeys([*mine, *theirs]) if mine.get(n) != theirs.get(n) and n != "output_dir"]
        rows = "".join(
            f"<tr><td>{escape(n)}</td><td>{escape(mine.get(n))}</td><td>{escape(theirs.get(n))}</td></tr>"
            for n in different
        )
        head = f"<tr><th>option</th><th>{escape(run.name)}</th><th>{escape(other.name)}</th></tr>"
        text = f"<table>{head}{rows}</table>" if rows else "<p>None.</p>"
        parts.append(f"<h2>Options that differ</h2>{text}")
    rows = "".join(f"<tr><td>{escape(n)}</td><td>{escape(v)}</td></tr>" for n, v in mine.items())
    versions = run.summary.get("versions")
    said = ", ".join(f"{escape(k)} {escape(v)}" for k, v in versions.items()) if isinstance(versions, dict) else ""
    parts.append(f"<details><summary>All options</summary><table>{rows}</table></details>")
    return "".join(parts) + (f'<p class="note">{said}</p>' if said else "")
