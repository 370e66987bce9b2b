"""Runs the recipes of launch/configs/recipes with several seeds, one run after the other, and writes their table.

    python tools/recipes_table.py --seeds 3 --steps 40 --out runs/recipes --doc docs/recipes.md

A run that has a finished summary is not repeated, so the command can be stopped and started again. The table has, for each
recipe, the held-out reward before and after (means over seeds; the standard error of the gain is over seeds), the largest
train/rollout difference, and the median seconds of a step without its evaluation. With --doc it is written between the
two marks of that file, together with the command; a row of TRL comes from --trl, a folder with the results of
benchmarks/trl_grpo.py by seed. `--only grpo,dapo` runs a part.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "launch/configs/recipes"
BEGIN, END = "<!-- recipes_table: begin -->", "<!-- recipes_table: end -->"


@dataclass(frozen=True)
class Result:
    """One run: held-out reward before and after, largest mean difference of log-probabilities, seconds a step."""

    before: float
    after: float
    mismatch: float | None
    step_seconds: float


def read_run(folder: Path) -> Result | None:
    """The result of a finished run, or None. TRL's runs are written in the same form."""
    summary_file, metrics_file = folder / "summary.json", folder / "metrics.jsonl"
    if not summary_file.exists() or not metrics_file.exists():
        return None
    summary = json.loads(summary_file.read_text())
    if summary.get("status") != "completed" or "eval_last" not in summary:
        return None
    rows: list[dict[str, Any]] = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    steps = [r["perf/step_time"] - r.get("timing_s/evaluate", 0.0) for r in rows if "perf/step_time" in r]
    return Result(
        summary["eval_first"]["eval/reward"],
        summary["eval_last"]["eval/reward"],
        summary.get("train_rollout_logprob_abs_diff_largest_mean"),
        statistics.median(steps),
    )


def run(recipe: str, seed: int, steps: int, folder: Path, ranks: int, minutes: float) -> None:
    """One training run. Raises if it fails or takes too long."""
    command = [
        *("torchrun", "--standalone", "--nproc-per-node", str(ranks), "--module", "rhymemeg.train"),
        *("--config", str(RECIPES / f"{recipe}.yaml"), "--output-dir", str(folder), "--seed", str(seed)),
        *("--train-iters", str(steps), "--eval-interval", str(steps), "--display", "lines", "--tensorboard", "False"),
        *("--save-samples-interval", "0"),
    ]
    print(f"--- {recipe}, seed {seed}: {' '.join(command)}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=60 * minutes, check=True)


def mean_error(values: list[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def with_error(mean: float, error: float, sign: str = "") -> str:
    """`0.700 ± 0.100`; one run alone has no error."""
    return f"{mean:{sign}.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def row(name: str, results: list[Result]) -> str:
    """One line of the table."""
    before, _ = mean_error([r.before for r in results])
    after, after_error = mean_error([r.after for r in results])
    gain, error = mean_error([r.after - r.before for r in results])
    mismatches = [r.mismatch for r in results if r.mismatch is not None]
    mismatch = f"{max(mismatches):.1e}" if mismatches else "-"
    seconds = statistics.median(r.step_seconds for r in results)
    return (
        f"| {name} | {len(results)} | {before:.3f} | {with_error(after, after_error)} "
        f"| {with_error(gain, error, '+')} "
        f"| {mismatch} | {seconds:.1f} |"
    )


def table(results: dict[str, list[Result]]) -> str:
    """The table as Markdown."""
    head = [
        "| recipe | seeds | held-out before | after | gain | largest mean logp difference | s a step |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(row(name, found) for name, found in results.items() if found)])


def write_between_marks(file: Path, text: str) -> None:
    """Put `text` between the marks of `file`."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{file}: the marks {BEGIN} and {END} are not there")
    aside = file.with_suffix(".tmp")
    aside.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    os.replace(aside, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs a recipe, with seeds 1, 2, ...")
    parser.add_argument("--steps", type=int, default=40, help="training steps a run")
    parser.add_argument("--only", default="", help="recipes, separated by commas; empty: all")
    parser.add_argument("--ranks", type=int, default=2, help="processes a run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/recipes", help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=30.0, help="a run that takes longer is ended")
    parser.add_argument("--trl", type=Path, help="folder with seed_N folders of benchmarks/trl_grpo.py")
    parser.add_argument("--doc", type=Path, help="file to write the table into")
    parser.add_argument("--no-run", action="store_true", help="only the table of what has been run")
    options = parser.parse_args(argv)
    known = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    names = options.only.split(",") if options.only else known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--only: no recipe {unknown[0]!r} (there are {', '.join(known)})")
    out = options.out.resolve()  # runs start in the repository
    results: dict[str, list[Result]] = {}
    for name in names:
        found = []
        for seed in range(1, options.seeds + 1):
            folder = out / f"{name}_{options.steps}" / f"seed_{seed}"
            if read_run(folder) is None and not options.no_run:
                run(name, seed, options.steps, folder, options.ranks, options.minutes)
            if (result := read_run(folder)) is not None:
                found.append(result)
        results[name] = found
    if options.trl is not None:
        folders = sorted(options.trl.glob("seed_*"))
        results["TRL GRPO"] = [result for folder in folders if (result := read_run(folder)) is not None]
    text = table(results)
    print(text)
    if options.doc is not None:
        words = ["python tools/recipes_table.py", f"--seeds {options.seeds}", f"--steps {options.steps}"]
        words += [f"--only {options.only}"] if options.only else []
        words += [f"--trl {options.trl}"] if options.trl else []
        command = " ".join([*words, f"--doc {options.doc}"])
        write_between_marks(options.doc, f"`{command}`, {options.steps} steps a run:\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
