"""Does the simulator predict the windows of a real run? `python -m rhymemeg.histopipe.calibrate RUN`.

Takes from RUN what a simulation needs: options (config.yaml), every response's length (samples/), the engine's step times that
were measured on the way (engine_profile.json), and the time that each window took (windows.jsonl). Simulates the same steps
with the same policy and prints, a line a window, measured and predicted seconds. Needs a run that saved the samples of every
step (--save-samples-interval 1).

Step times are medians over the run, so a window on a machine that was busy with something else takes longer than predicted;
the median over windows is the figure to look at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rhymemeg.config import Config
from rhymemeg.errors import DataError, RhymeMegError
from rhymemeg.histopipe.cost import CostModel, load_profile
from rhymemeg.histopipe.record import WindowRecord, read_windows
from rhymemeg.histopipe.simulator import Setting, Simulator
from rhymemeg.histopipe.workloads import StepLengths
from rhymemeg.observe.read_run import read_metrics


@dataclass(frozen=True)
class Comparison:
    """One window, in seconds and in engine steps of the busiest engine."""

    step: int
    measured: float
    predicted: float
    measured_steps: int
    predicted_steps: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def read_steps(folder: Path, samples_per_prompt: int) -> list[StepLengths]:
    """Lengths of all steps, each with those of the same prompts' last visit. DataError where a step is not complete."""
    lengths: dict[int, dict[int, list[int]]] = {}
    for file in folder.glob("step_*.jsonl"):
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line.decode("utf-8"))
                step, prompt, length = int(entry["step"]), int(entry["prompt_id"]), int(entry["length"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(f"{file}, line {number}: not a sample: {error!r}") from None
            lengths.setdefault(step, {}).setdefault(prompt, []).append(length)
    steps: list[StepLengths] = []
    last: dict[int, list[int]] = {}
    for step in range(len(lengths)):
        if step not in lengths or any(len(group) != samples_per_prompt for group in lengths[step].values()):
            raise DataError(f"{folder}: the samples of step {step} are not complete")
        prompts = sorted(lengths[step])
        unknown = [float("nan")] * samples_per_prompt
        steps.append(
            StepLengths(
                np.array(prompts),
                np.array([last.get(p, unknown) for p in prompts], np.float64),
                np.array([lengths[step][p] for p in prompts], np.int64),
            )
        )
        last |= lengths[step]
    return steps


def compare(setting: Setting, steps: Sequence[StepLengths], records: Sequence[WindowRecord]) -> list[Comparison]:
    """Simulate all steps in a row; `records` are the measured windows of the same steps."""
    simulator = Simulator(setting)
    by_step = {record.step: record for record in records}
    result = []
    for i, now in enumerate(steps):
        predicted = simulator.run_window(now, steps[min(i + 1, len(steps) - 1)])
        if (measured := by_step.get(i)) is not None:
            result.append(
                Comparison(
                    i,
                    measured.seconds,
                    predicted.seconds,
                    max(measured.engine_steps, default=0),
                    max(predicted.engine_steps, default=0),
                )
            )
    return result


def setting_of(options: dict, cost: CostModel, engines: int, prompt_tokens: int) -> Setting:
    """The simulator's setting for the options of a run."""
    rollout, pipe = options["rollout"], options["histopipe"]
    return Setting(
        policy=pipe["histopipe_policy"],
        layout=pipe["histopipe_layout"],
        carry=pipe["histopipe_carry"],
        early=pipe["histopipe_early"],
        steal=pipe["histopipe_steal"],
        migrate=pipe["histopipe_policy"] == "paper",
        engines=engines,
        slots=options["engine"]["vllm_max_num_seqs"],
        samples=rollout["n_samples_per_prompt"],
        cap=rollout["max_response_len"],
        prompt_tokens=prompt_tokens,
        cost=cost,
        seed=options["run"]["seed"],
    )


def run(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    try:
        config = Config.load_yaml(folder / "config.yaml").model_dump()
        metrics = read_metrics(folder / "metrics.jsonl")
    except RhymeMegError as error:
        raise DataError(f"{folder}: not the directory of a run: {str(error).removeprefix('--config: ')}") from None
    if config["histospec"]["histospec"] or config["engine"]["vllm_speculative_config"]:
        raise DataError(f"{folder}: this run drafted; calibrate on one without speculation")
    steps = read_steps(folder / "samples", config["rollout"]["n_samples_per_prompt"])
    records = read_windows(folder / "windows.jsonl")
    if not records or not steps:
        raise DataError(f"{folder}: no windows")
    prompt_tokens = [
        round(row["rollout/prompt_tokens"] / row["rollout/samples"])
        for row in metrics
        if row.get("rollout/samples") and "rollout/prompt_tokens" in row
    ]
    if not prompt_tokens:
        raise DataError(f"{folder / 'metrics.jsonl'}: no step with rollout/samples and rollout/prompt_tokens")
    cost = load_profile(folder / "engine_profile.json")
    setting = setting_of(config, cost, records[0].num_engines, round(statistics.mean(prompt_tokens)))
    rows = compare(setting, steps, records)
    print("step  measured s  predicted s   error   steps measured / predicted")
    for row in rows:
        print(
            f"{row.step:4}  {row.measured:10.2f}  {row.predicted:11.2f}  {100 * row.error:+5.1f} %   "
            f"{row.measured_steps} / {row.predicted_steps}"
        )
    errors = [row.error for row in rows]
    total = sum(row.predicted for row in rows) / sum(row.measured for row in rows) - 1
    print(
        f"{len(rows)} windows: median error {100 * statistics.median(errors):+.1f} %, median absolute error "
        f"{100 * statistics.median(map(abs, errors)):.1f} %, all windows together {100 * total:+.1f} %"
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m rhymemeg.histopipe.calibrate", description="Compare simulated with measured rollout windows."
    )
    parser.add_argument("run", help="directory of a run without speculation")
    try:
        return run(parser.parse_args(arguments))
    except RhymeMegError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
