"""Times of a real run, from the metrics.jsonl in its directory: seconds of each phase for the work that it had. Pure.

A step that generates more tokens takes longer without anything being slower, so times are divided by the work of the step:

    rollout                                  a token generated
    train, old_log_probs, ref_log_probs, batch   a token trained (prompt and response)
    reward, log                              a sample
    everything else                          a step (those steps that have the phase)
    step                                     a token generated; the whole step

`skip` steps at the beginning are left out: what is set up at its first use belongs to no step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhymemeg.errors import DataError
from rhymemeg.observe.read_run import Floats, RunData

UNITS = {
    "rollout": "generated token",
    "step": "generated token",
    "train": "trained token",
    "old_log_probs": "trained token",
    "ref_log_probs": "trained token",
    "batch": "trained token",
    "reward": "sample",
    "log": "sample",
}
SKIP = 2
# What two runs must share for step i of one to have had the same prompts as step i of the other.
SAME_WORK = (
    *("seed", "data_seed", "prompt_data", "num_prompts", "rollout_batch_size", "n_samples_per_prompt"),
    *("max_response_len", "shuffle", "hf_checkpoint"),
)


@dataclass(frozen=True)
class PhaseTimes:
    """One phase: `steps` [N] that have it, `seconds` [N] for a `unit` of work, and the mean seconds of a step (over all
    steps, also those without it)."""

    name: str
    unit: str
    steps: Floats
    seconds: Floats
    mean_seconds: float


def phase_times(run: RunData, skip: int = SKIP) -> list[PhaseTimes]:
    """The phases of a run, the longest first, and `step`. DataError where nothing is left."""
    rows = [row for row in run.rows if "perf/step_time" in row][skip:]
    if not rows:
        raise DataError(f"{run.path / 'metrics.jsonl'}: no step with times after the first {skip}")
    found = []
    for name in [*run.names("timing_s/"), "perf/step_time"]:
        phase = "step" if name == "perf/step_time" else name.removeprefix("timing_s/")
        unit = UNITS.get(phase, "step")
        steps, seconds = [], []
        for row in rows:
            work = _work(row, unit)
            if row.get(name, 0.0) > 0 and work > 0:
                steps.append(row["step"])
                seconds.append(row[name] / work)
        if steps:
            mean = sum(row.get(name, 0.0) for row in rows) / len(rows)
            found.append(PhaseTimes(phase, unit, np.array(steps), np.array(seconds), mean))
    return sorted(found, key=lambda p: -p.mean_seconds)


def _work(row: dict[str, float], unit: str) -> float:
    if unit == "generated token":
        return row.get("rollout/tokens", 0.0)
    if unit == "trained token":
        return row.get("rollout/tokens", 0.0) + row.get("rollout/prompt_tokens", 0.0)
    return row.get("rollout/samples", 0.0) if unit == "sample" else 1.0


def same_work(a: RunData, b: RunData) -> bool:
    """Whether the steps of two runs can be compared one by one."""
    return bool(a.config and b.config) and all(a.option(name) == b.option(name) for name in SAME_WORK)


def common(a: PhaseTimes, b: PhaseTimes) -> tuple[Floats, Floats]:
    """Seconds of the steps that both have, in the same order."""
    _, i, j = np.intersect1d(a.steps, b.steps, return_indices=True)
    return a.seconds[i], b.seconds[j]
