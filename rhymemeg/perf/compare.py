"""Which phase moved, by how much, and how sure that is: two results, a result against a history, or two runs. Pure.

`Comparison` is what comes out, and `text`, `markdown` and `as_json` say it. A measure whose repeats had the machine's speed
measured beside them (`reference_rounds`) is compared as time divided by that speed where this is the steadier of the two, as
it is when the machine as a whole ran slower, and as time otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from rhymemeg.errors import DataError
from rhymemeg.observe.read_run import RunData
from rhymemeg.perf import statistics
from rhymemeg.perf.result import Measure, Result, fingerprint, merge_versions
from rhymemeg.perf.runs import PhaseTimes, common, phase_times, same_work
from rhymemeg.perf.statistics import Change, Rounds, Rule

PAIRS = 8
"""Common steps from which on two runs are compared step by step."""


@dataclass(frozen=True)
class Line:
    """One measure. `before` and `after`: typical seconds for a `unit`. `points`: of a phase of a run, by how much of the
    reference's step it lengthened the step (0.01: one per cent)."""

    name: str
    phase: str
    unit: str
    before: float
    after: float
    change: Change
    how: str
    points: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """`lines`, worst first where something moved; `notes` on what the reader should know."""

    reference: str
    new: str
    lines: list[Line]
    rule: Rule
    notes: list[str] = field(default_factory=list)

    @property
    def slower(self) -> list[Line]:
        return [line for line in self.lines if line.change.verdict == "slower"]

    @property
    def faster(self) -> list[Line]:
        return [line for line in self.lines if line.change.verdict == "faster"]

    def status(self, fail_on: str) -> int:
        """0, or 1 where something is slower (`fail_on` "moved": or faster)."""
        return int(bool(self.slower) or (fail_on == "moved" and bool(self.faster)))


# ------------------------------------------------------------------------------------------------------------ comparing


def compare_results(reference: Sequence[Result], new: Result, rule: Rule, across_machines: bool = False) -> Comparison:
    """`new` against one result, or against a history of several. DataError where they cannot be compared."""
    newest = reference[-1]
    notes = []
    if fingerprint(newest.machine) != fingerprint(new.machine):
        if not across_machines:
            raise DataError(
                f"{_name(newest)} and {_name(new)} are of different machines ({_machine(newest)}; {_machine(new)}); "
                "--across-machines compares them all the same, as ratios to each machine's own speed"
            )
        notes.append(
            f"different machines: {_machine(newest)}; {_machine(new)}; times are ratios to each one's own speed"
        )
    if newest.settings != new.settings:
        raise DataError(
            f"{_name(newest)} and {_name(new)} were measured with different settings, see `settings` in both"
        )
    notes += _version_notes(reference, new)
    known = {m.name: m for m in newest.measures}
    turns = len(reference) == 1 and bool(new.interleaved) and newest.interleaved == new.interleaved
    lines = []
    for measure in new.measures:
        if measure.name not in known:
            notes.append(f"{measure.name} is new: nothing to compare it with")
            continue
        pasts = [m for r in reference for m in r.measures if m.name == measure.name]
        lines.append(_compare_measure(pasts, measure, rule, turns, across_machines))
    missing = known.keys() - {m.name for m in new.measures}
    notes += [f"{name} is missing in {_name(new)}" for name in sorted(missing)]
    if not lines:
        raise DataError(f"{_name(newest)} and {_name(new)} have no measure in common")
    return Comparison(
        _name(newest) if len(reference) == 1 else f"{len(reference)} results", _name(new), _sorted(lines), rule, notes
    )


def _compare_measure(pasts: Sequence[Measure], new: Measure, rule: Rule, turns: bool, always_relative: bool) -> Line:
    before = math.exp(statistics.location([r for m in pasts for r in m.rounds]))
    after = math.exp(statistics.location(new.rounds))
    if turns and [len(r) for r in pasts[0].rounds] == [len(r) for r in new.rounds]:
        change = statistics.compare_turns(pasts[0].rounds, new.rounds, rule)
        return Line(new.name, new.phase, new.unit, before, after, change, f"{new.clock} time, in turns")
    tried = []
    for relative in (True,) if always_relative else (False, True):
        if relative and not all(m.reference_rounds for m in (*pasts, new)):
            continue
        histories = [_relative(m) if relative else m.rounds for m in pasts]
        rounds = [r for history in histories for r in history]
        now = _relative(new) if relative else new.rounds
        change = statistics.compare(rounds, now, rule, between_runs=statistics.between_runs(histories))
        tried.append((change, "relative to the machine's speed" if relative else f"{new.clock} time"))
    if not tried:
        raise DataError(f"measure {new.name!r} has no times of the machine's speed, which --across-machines needs")
    # The narrower band is chosen, not the smaller or the larger difference: the choice does not look at the outcome.
    change, how = min(tried, key=lambda item: (not math.isfinite(item[0].band), item[0].band))
    return Line(new.name, new.phase, new.unit, before, after, change, how)


def _relative(measure: Measure) -> Rounds:
    """Each time over that of the fixed work right before it."""
    return [
        [seconds / speed for seconds, speed in zip(repeats, speeds)]
        for repeats, speeds in zip(measure.rounds, measure.reference_rounds)
    ]


def compare_runs(reference: RunData, new: RunData, rule: Rule, skip: int) -> Comparison:
    """Two run directories."""
    notes = []
    pairs = same_work(reference, new)
    if not pairs:
        notes.append(
            "the runs had other options, seeds or prompts: steps are not compared one by one, which is less sharp"
        )
    past = {p.name: p for p in phase_times(reference, skip)}
    present = phase_times(new, skip)
    step = past["step"].mean_seconds
    lines = []
    for phase in present:
        if phase.name not in past:
            notes.append(f"phase {phase.name} is new ({phase.mean_seconds:.3g} s a step)")
            continue
        lines.append(_compare_phase(past[phase.name], phase, rule, pairs, step))
    notes += [f"phase {name} is gone" for name in past if name not in {p.name for p in present}]
    return Comparison(str(reference.path), str(new.path), _sorted(lines), rule, notes)


def _compare_phase(past: PhaseTimes, now: PhaseTimes, rule: Rule, pairs: bool, step: float) -> Line:
    a, b = common(past, now)
    paired = pairs and len(a) >= PAIRS
    if not paired and len(a) < PAIRS:
        a, b = past.seconds, now.seconds
    change = statistics.compare_series(a, b, rule, paired=paired)
    points = (change.ratio - 1) * past.mean_seconds / step
    how = "step by step" if paired else f"{len(a)} and {len(b)} steps"
    return Line(now.name, now.name, f"s a {now.unit}", _middle(a), _middle(b), change, how, points)


def _middle(values: np.ndarray) -> float:
    return float(np.exp(statistics.trimmed_mean(np.log(values))))


def _sorted(lines: list[Line]) -> list[Line]:
    """What moved first, by its part of the step where known, else by its size; the whole step after its phases."""

    def key(line: Line) -> tuple[bool, bool, float]:
        size = abs(line.points) if math.isfinite(line.points) else abs(line.change.ratio - 1)
        return not line.change.moved, line.name == "step", -size if math.isfinite(size) else 0.0

    return sorted(lines, key=key)


def _name(result: Result) -> str:
    return result.label or result.source or result.made


def _machine(result: Result) -> str:
    facts = result.machine
    gpus = f", {len(facts['gpus'])} x {facts['gpus'][0]}" if facts.get("gpus") else ""
    return f"{facts.get('cpu', '?')}, {facts.get('cores', '?')} cores{gpus}"


def _version_notes(reference: Sequence[Result], new: Result) -> list[str]:
    notes = []
    for name, versions in sorted(merge_versions(reference).items()):
        if new.versions.get(name) not in versions:
            notes.append(f"{name} {' or '.join(sorted(versions))} then, {new.versions.get(name, 'not installed')} now")
    for fact in ("kernel", "gpus"):
        before = {json.dumps(r.machine.get(fact)) for r in reference}
        if json.dumps(new.machine.get(fact)) not in before:
            notes.append(f"{fact}: {' or '.join(sorted(before))} then, {json.dumps(new.machine.get(fact))} now")
    return notes


# --------------------------------------------------------------------------------------------------------------- saying


def percent(ratio: float) -> str:
    """+5.0 % for 1.05."""
    return f"{100 * (ratio - 1):+.1f} %" if math.isfinite(ratio) else "-"


def seconds(value: float) -> str:
    """With a unit that suits the size."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def verdict(comparison: Comparison) -> str:
    """One sentence."""
    if not comparison.slower and not comparison.faster:
        blind = [line.name for line in comparison.lines if line.change.verdict in ("noisy", "too few")]
        return "nothing moved" + (f"; not to be judged: {', '.join(blind)}" if blind else "")
    parts = []
    for word, lines in (("slower", comparison.slower), ("faster", comparison.faster)):
        if lines:
            parts.append(f"{word}: " + ", ".join(f"{line.name} {percent(line.change.ratio)}" for line in lines))
    return "; ".join(parts)


HEAD = ("measure", "before", "after", "change", "interval", "band", "verdict", "of the step", "compared")


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table, a line a measure."""
    return [
        (
            line.name,
            seconds(line.before),
            seconds(line.after),
            percent(line.change.ratio),
            f"{percent(line.change.low)} .. {percent(line.change.high)}",
            f"±{100 * line.change.band:.1f} %" if math.isfinite(line.change.band) else "-",
            line.change.verdict,
            f"{100 * line.points:+.1f} points" if math.isfinite(line.points) else "",
            line.how,
        )
        for line in comparison.lines
    ]


def text(comparison: Comparison) -> str:
    """For a terminal."""
    table = [HEAD, *rows(comparison)]
    if all(not row[7] for row in table[1:]):
        table = [(*row[:7], row[8]) for row in table]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [f"{comparison.new} against {comparison.reference}", ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    rule = comparison.rule
    lines += [
        "",
        f"interval: bootstrap, {100 * rule.confidence:g} %; band: {100 * rule.smallest:g} % or {rule.sigmas:g} standard errors",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes), "", verdict(comparison)])


def markdown(comparison: Comparison) -> str:
    """For a comment on a change."""
    lines = [f"**{verdict(comparison)}**", "", f"{comparison.new} against {comparison.reference}", ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in rows(comparison):
        cells = [cell.replace("|", "\\|") for cell in row]
        if row[6] in ("slower", "faster"):
            cells[6] = f"**{cells[6]}**"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {note}" for note in comparison.notes)]) + "\n"


def as_json(comparison: Comparison) -> str:
    """Everything; what is not a number is null."""
    entry = asdict(comparison) | {"verdict": verdict(comparison), "slower": [line.name for line in comparison.slower]}

    def finite(value: object) -> object:
        if isinstance(value, dict):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(entry), indent=1) + "\n"
