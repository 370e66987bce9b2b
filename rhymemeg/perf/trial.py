"""Does `rhymemeg perf compare` find what it should, and nothing else? Planted slowdowns on noise like that of real repeats.

    python -m rhymemeg.perf.trial                                               noise of a steady machine, results and runs
    python -m rhymemeg.perf.trial --recorded tests/perf/repeats.json            and noise recorded on a real, shared machine

A trial draws a reference and a new result (or two runs) from the same noise, multiplies one measure (one phase) of the new one by
1, 1.05 or 1.10, and compares. Printed are, of `--trials` each: alarms without a change (either direction), slowdowns found,
and the median band. A phase of a run counts as found when it is called slower itself; alarms are those of any other phase but
the whole step, which a slower phase may rightly move.

Noise. `steady`: log-normal, 1.5 % (a round has 0.5 % of its own), one repeat in 20 half as long again. Recorded: rounds and
repeats drawn from real ones. Runs: AR(1) in time, correlation 0.5, of 3 % a phase, one step in 100 half as long again, and work
that varies by 10 % from step to step, the same in both runs where they are compared step by step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rhymemeg.errors import DataError, RhymeMegError
from rhymemeg.observe.read_run import Floats, RunData
from rhymemeg.perf.compare import compare_runs
from rhymemeg.perf.statistics import Change, Rule, compare, compare_turns

PLANTED = (1.0, 1.05, 1.10)
Draw = Callable[[np.random.Generator], list[list[float]]]


@dataclass(frozen=True)
class Outcome:
    """Counts of `trials` for each planted factor: called slower, called faster; alarms on what was not planted."""

    name: str
    trials: int
    slower: tuple[int, ...]
    faster: tuple[int, ...]
    others: int
    band: float

    @property
    def false_alarms(self) -> int:
        """Of the unchanged ones, and on unchanged phases beside a planted one."""
        return self.slower[0] + self.faster[0] + self.others


def steady(rounds: int, repeats: int) -> Draw:
    """See the module."""

    def draw(rng: np.random.Generator) -> list[list[float]]:
        times = np.exp(rng.normal(0, 0.005, (rounds, 1)) + rng.normal(0, 0.015, (rounds, repeats)))
        return (times * np.where(rng.random(times.shape) < 0.05, 1.5, 1.0)).tolist()

    return draw


def recorded(real: Sequence[Sequence[float]], rounds: int, repeats: int) -> Draw:
    """Real rounds drawn with replacement, and the repeats in each."""

    def draw(rng: np.random.Generator) -> list[list[float]]:
        return [rng.choice(np.asarray(real[i]), repeats).tolist() for i in rng.integers(len(real), size=rounds)]

    return draw


def try_results(name: str, draw: Draw, trials: int, rule: Rule, seed: int = 0) -> Outcome:
    """Two results, one after the other."""
    rng = np.random.default_rng(seed)
    found = [[compare(draw(rng), _times(draw(rng), f), rule) for _ in range(trials)] for f in PLANTED]
    return _outcome(name, trials, found)


def try_turns(
    name: str,
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    rounds: int,
    repeats: int,
    trials: int,
    rule: Rule,
) -> Outcome:
    """Two results measured in turns: real pairs of the same code, drawn together."""
    rng = np.random.default_rng(0)

    def one(factor: float) -> Change:
        a, b = [], []
        for i in rng.integers(len(pairs), size=rounds):
            picks = rng.integers(len(pairs[i][0]), size=repeats)
            a.append(np.asarray(pairs[i][0])[picks].tolist())
            b.append((factor * np.asarray(pairs[i][1])[picks]).tolist())
        return compare_turns(a, b, rule)

    return _outcome(name, trials, [[one(f) for _ in range(trials)] for f in PLANTED])


def _times(rounds: list[list[float]], factor: float) -> list[list[float]]:
    return [[factor * seconds for seconds in repeats] for repeats in rounds]


def _outcome(name: str, trials: int, found: list[list[Change]], others: int = 0) -> Outcome:
    return Outcome(
        name,
        trials,
        tuple(sum(c.verdict == "slower" for c in changes) for changes in found),
        tuple(sum(c.verdict == "faster" for c in changes) for changes in found),
        others,
        float(np.median([c.band for changes in found for c in changes])),
    )


# ----------------------------------------------------------------------------------------------------------------- runs

PHASES = {"rollout": 60.0, "train": 30.0, "old_log_probs": 8.0, "sync": 2.0, "reward": 1.0, "log": 0.3}
"""Seconds of a step, as of a run on GPUs."""


def noisy_run(rng: np.random.Generator, work: Floats, planted: dict[str, float], spread: float) -> RunData:
    """A run with `work` tokens a step and noise of `spread` in every phase."""
    steps = len(work)
    rows: list[dict[str, float]] = [
        {"step": float(i), "rollout/tokens": w, "rollout/prompt_tokens": 0.1 * w, "rollout/samples": 512.0}
        for i, w in enumerate(work.tolist())
    ]
    for name, seconds in PHASES.items():
        noise = np.empty(steps)
        noise[0] = rng.normal()
        for i in range(1, steps):
            noise[i] = 0.5 * noise[i - 1] + np.sqrt(1 - 0.25) * rng.normal()
        times = seconds * np.exp(spread * noise) * np.where(rng.random(steps) < 0.01, 1.5, 1.0)
        if name in ("rollout", "train", "old_log_probs"):
            times = times * work / 1e6
        for row, value in zip(rows, (times * planted.get(name, 1.0)).tolist()):
            row[f"timing_s/{name}"] = value
            row["perf/step_time"] = row.get("perf/step_time", 0.0) + value
    return RunData(Path("run"), rows, config={"run": {"seed": 1}})


def try_runs(phase: str, steps: int, trials: int, rule: Rule, spread: float = 0.03, same_work: bool = True) -> Outcome:
    """Two runs; `phase` of the new one is planted."""
    rng = np.random.default_rng(0)
    found: list[list[Change]] = []
    others = 0
    for factor in PLANTED:
        changes = []
        for _ in range(trials):
            work = 1e6 * rng.lognormal(0, 0.1, steps)
            again = work if same_work else 1e6 * rng.lognormal(0, 0.1, steps)
            before, after = noisy_run(rng, work, {}, spread), noisy_run(rng, again, {phase: factor}, spread)
            if not same_work:
                after.config["run"]["seed"] = 2
            lines = {line.name: line.change for line in compare_runs(before, after, rule, 2).lines}
            changes.append(lines[phase])
            others += sum(c.moved for name, c in lines.items() if name not in (phase, "step"))
        found.append(changes)
    return _outcome(phase, trials, found, others)


# ---------------------------------------------------------------------------------------------------------------- table


def table(title: str, outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [
        title,
        "",
        "| measure | unchanged: alarms | 5 % found | 10 % found | band (median) |",
        "|---|---|---|---|---|",
    ]
    for o in outcomes:
        cells = [o.name, f"{o.false_alarms} of {o.trials}", *(f"{n} of {o.trials}" for n in o.slower[1:])]
        lines.append("| " + " | ".join([*cells, f"±{100 * o.band:.1f} %"]) + " |")
    return "\n".join([*lines, ""])


def read_recorded(file: str) -> dict[str, dict[str, list]]:
    """{machine: {measure: rounds}}; of machines named `turns ...`, a round is a pair of lists."""
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--recorded {file}: cannot be read: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--steps", type=int, default=300, help="steps of a run (300)")
    parser.add_argument("--recorded", help="JSON of real repeats")
    parser.add_argument("--only", nargs="+", help="steady, runs, or names of recorded machines; default: all")
    o = parser.parse_args(argv)

    def wanted(name: str) -> bool:
        return not o.only or name in o.only

    rule = Rule()
    size = f"{o.rounds} rounds x {o.repeats} repeats"
    try:
        if wanted("steady"):
            outcome = try_results("any", steady(o.rounds, o.repeats), o.trials, rule)
            print(table(f"Two results, steady machine, {size}", [outcome]))
        for machine, measures in (read_recorded(o.recorded) if o.recorded else {}).items():
            if not wanted(machine):
                continue
            if machine.startswith("turns"):
                outcomes = [try_turns(n, p, o.rounds, o.repeats, o.trials, rule) for n, p in measures.items()]
            else:
                outcomes = [
                    try_results(n, recorded(real, o.rounds, o.repeats), o.trials, rule) for n, real in measures.items()
                ]
            print(table(f"Two results, noise recorded on a machine: {machine}, {size}", outcomes))
        for same in (True, False) if wanted("runs") else ():
            how = "step by step" if same else "as different work"
            outcomes = [try_runs(phase, o.steps, o.trials, rule, same_work=same) for phase in PHASES]
            print(table(f"Two runs of {o.steps} steps, compared {how}", outcomes))
    except RhymeMegError as error:
        print(f"trial: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
