"""Whole training runs with and without HistoSpec and HistoPipe, against what trainers do without them.

    python -m benchmarks.together --output runs/together            the table of docs/results.md (long: 25 runs)
    python -m benchmarks.together --arms random histopipe --ranks 4 --repeats 3

Each arm is a run of `rhymemeg.train` with the quickstart's options (`--config`), more epochs over fewer prompts, and what
the arm is about; arms take turns in each repeat, and repeat r has seed r in all of them. After the first epoch there is
history, and only steps after it are counted: medians over steps, then over repeats; ratios are to the baseline of the same
repeat.

    baseline    samples dealt evenly at random, windows end with the slowest engine, no drafts
    suffix      the same with vLLM's suffix decoding (needs arctic-inference; left out where it is missing)
    histospec   the same with drafts from history
    histopipe   longest first, spread, stealing, a carry of at most `--carry`, an early share of `--early`; no drafts
    both        histospec and histopipe
    strict      as histopipe, with nothing carried or early (not among the default arms)

`idle` counts engine steps (see `histopipe.record`), so noise on the machine does not touch it; `idle time` is by the clock.
Reward is the mean of the last epoch over repeats, with its standard error; held-out is measured before the first step, in the
middle and after the last; length is that of the samples of the counted steps.

Prints Markdown; everything is in OUTPUT/together.json, the reward curves in OUTPUT/together.png (where matplotlib is). A run that
together.json has is not repeated, so that a measurement that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rhymemeg.observe.files import write_atomically

STEAL_OFF = ("--histopipe-steal", "False")
SUFFIX = json.dumps({"method": "suffix", "num_speculative_tokens": 16})


def arms(carry: float = 0.0, early: float = 0.0, layout: str = "group") -> dict[str, tuple[str, ...]]:
    """Options of each arm."""
    plain = ("--histopipe-policy", "random", *STEAL_OFF)
    strict = ("--histopipe-policy", "complement", "--histopipe-layout", layout)
    piped = (*strict, "--histopipe-carry", str(carry), "--histopipe-early", str(early))
    return {
        "baseline": plain,
        "suffix": (*plain, "--vllm-speculative-config", SUFFIX),
        "histospec": (*plain, "--histospec"),
        "histopipe": piped,
        "both": (*piped, "--histospec"),
        "strict": strict,
    }


@dataclass
class Result:
    """One run: medians over the steps after the first epoch, and rewards."""

    arm: str
    repeat: int
    tokens_per_second: float
    step_seconds: float
    rollout_seconds: float
    window_seconds: float
    idle_steps: float
    idle_time: float
    engine_steps_per_token: float
    stale_share: float
    tokens_per_request_step: float | None
    mean_length: float
    reward_by_epoch: list[float]
    held_out: list[float]
    """Before the first step, in the middle, after the last."""


def read(folder: Path, arm: str, repeat: int, epoch: int) -> Result:
    """From metrics.jsonl and windows.jsonl; `epoch` is the number of steps of one."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    windows = [json.loads(line) for line in (folder / "windows.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/step_time" in row]
    counted, seen = steps[epoch:], windows[epoch:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in counted)

    idle, busy = sum(sum(w["idle_steps"]) for w in seen), sum(sum(w["engine_steps"]) for w in seen)
    seconds = sum(w["seconds"] * w["num_engines"] for w in seen)
    # A step's time without what only some steps do.
    plain = [
        row["perf/step_time"] - row.get("timing_s/evaluate", 0.0) - row.get("timing_s/checkpoint", 0.0)
        for row in counted
    ]
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    held_out = [row["eval/reward"] for row in rows if row.get("eval/reward") is not None]
    drafted = [
        row["histospec/tokens_per_request_step"] for row in counted if "histospec/tokens_per_request_step" in row
    ]
    return Result(
        arm=arm,
        repeat=repeat,
        tokens_per_second=sum(w["generated_tokens"] for w in seen) / sum(w["seconds"] for w in seen),
        step_seconds=statistics.median(plain),
        rollout_seconds=median("timing_s/rollout"),
        window_seconds=statistics.median(w["seconds"] for w in seen),
        idle_steps=idle / (idle + busy),
        idle_time=sum(sum(w["idle_seconds"]) for w in seen) / seconds,
        engine_steps_per_token=busy / sum(w["generated_tokens"] for w in seen),
        stale_share=sum(w["stale_tokens"] for w in seen) / max(sum(w["tokens"] for w in seen), 1),
        tokens_per_request_step=statistics.median(drafted) if drafted else None,
        mean_length=statistics.mean(row["rollout/response_len_mean"] for row in counted),
        reward_by_epoch=[statistics.mean(rewards[i : i + epoch]) for i in range(0, len(rewards), epoch)],
        held_out=held_out,
    )


def train(options: argparse.Namespace, arm: str, repeat: int, words: Sequence[str]) -> Result:
    """One run. Its output is in FOLDER.log."""
    folder = Path(options.output) / f"{arm}_{repeat}"
    epoch = options.prompts // options.batch
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)),
        *("--module", "rhymemeg.train", "--config", options.config, "--display", "lines"),
        *(
            "--output-dir",
            str(folder),
            "--seed",
            str(options.seed + repeat),
            "--train-iters",
            str(epoch * options.epochs),
        ),
        *("--num-prompts", str(options.prompts), "--rollout-batch-size", str(options.batch)),
        *("--eval-interval", str(max(epoch * options.epochs // 2, 1)), "--save-interval", "0", "--save-final", "False"),
        *("--export-hf", "False", "--tensorboard", "False", *words, *options.extra),
    ]
    command = [word for word in command if word]
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=options.timeout, check=False)
    if done.returncode:
        raise SystemExit(f"{arm}, repeat {repeat}: the run failed, see {log}")
    return read(folder, arm, repeat, epoch)


def table(results: Sequence[Result], names: Sequence[str]) -> str:
    """Markdown: medians over repeats, ratios to the first arm of the same repeat."""
    lines = [
        "| arm | rollout tokens/s | ratio | step s | ratio | window s | idle steps | idle time | engine steps / token | "
        "tokens / request-step | stale | reward, last epoch | held-out: start / middle / end | length |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = {r.repeat: r for r in results if r.arm == names[0]}

    def med(values: Sequence[float]) -> float:
        return statistics.median(values) if values else float("nan")

    def mean_se(values: Sequence[float]) -> str:
        if not values:
            return "-"
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return f"{statistics.mean(values):.3f} ± {error:.3f}"

    for name in names:
        mine = [r for r in results if r.arm == name]
        pairs = [(r, first[r.repeat]) for r in mine if r.repeat in first]
        drafted = [r.tokens_per_request_step for r in mine if r.tokens_per_request_step is not None]
        cells = [
            name,
            f"{med([r.tokens_per_second for r in mine]):,.0f}",
            f"{med([r.tokens_per_second / b.tokens_per_second for r, b in pairs]):.2f}",
            f"{med([r.step_seconds for r in mine]):.2f}",
            f"{med([b.step_seconds / r.step_seconds for r, b in pairs]):.2f}",
            f"{med([r.window_seconds for r in mine]):.2f}",
            f"{100 * med([r.idle_steps for r in mine]):.1f} %",
            f"{100 * med([r.idle_time for r in mine]):.1f} %",
            f"{med([r.engine_steps_per_token for r in mine]):.4f}",
            f"{med(drafted):.2f}" if drafted else "-",
            f"{100 * med([r.stale_share for r in mine]):.1f} %",
            mean_se([r.reward_by_epoch[-1] for r in mine]),
            " / ".join(mean_se(column) for column in zip(*(r.held_out for r in mine))) or "-",
            f"{statistics.mean(r.mean_length for r in mine):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: Sequence[Result], names: Sequence[str], path: Path) -> None:
    """Mean reward by epoch, a line an arm, with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name in names:
        curves = [r.reward_by_epoch for r in results if r.arm == name]
        if not curves:
            continue
        columns = list(zip(*curves))
        means = [statistics.mean(c) for c in columns]
        errors = [statistics.stdev(c) / len(c) ** 0.5 if len(c) > 1 else 0.0 for c in columns]
        axes.errorbar(range(len(means)), means, errors, label=name, capsize=3)
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean reward of the trained samples")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--arms",
        nargs="+",
        default=["baseline", "suffix", "histospec", "histopipe", "both"],
        help="the first is the baseline",
    )
    add("--repeats", type=int, default=5)
    add("--epochs", type=int, default=4)
    add("--prompts", type=int, default=64, help="prompts an epoch")
    add("--batch", type=int, default=16, help="prompts a step")
    add("--ranks", type=int, default=2)
    add("--carry", type=float, default=0.06, help="limit of --histopipe-carry")
    add("--early", type=float, default=0.05, help="--histopipe-early")
    add("--layout", default="spread", help="--histopipe-layout")
    add("--seed", type=int, default=1)
    add("--config", default="launch/configs/quickstart.yaml")
    add("--output", default="runs/together")
    add("--timeout", type=float, default=1200.0, help="seconds of one run")
    add("--extra", nargs=argparse.REMAINDER, default=[], help="options for all arms, last")
    options = parser.parse_args(argv)
    unknown = set(options.arms) - set(arms())
    if unknown:
        parser.error(f"--arms: {', '.join(sorted(unknown))}: known are {', '.join(arms())}")
    if options.prompts % options.batch:
        parser.error(f"--prompts {options.prompts} is no multiple of --batch {options.batch}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run all and print the table; what has been measured is in together.json after every run."""
    options = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = list(options.arms)
    if "suffix" in names and importlib.util.find_spec("arctic_inference") is None:
        print("suffix is left out: arctic-inference is not installed", file=sys.stderr)
        names.remove("suffix")
    every, results = (
        arms(options.carry, options.early, options.layout),
        load(Path(options.output) / "together.json", options),
    )
    done = {(r.arm, r.repeat) for r in results}
    for repeat in range(options.repeats):
        for name in names:
            if (name, repeat) in done:
                continue
            results.append(train(options, name, repeat, every[name]))
            print(f"repeat {repeat}: {json.dumps(_short(results[-1]))}", file=sys.stderr, flush=True)
            body = {"options": vars(options), "results": [asdict(r) for r in results]}
            write_atomically(Path(options.output) / "together.json", json.dumps(body, indent=1) + "\n")
    print(table(results, names))
    if importlib.util.find_spec("matplotlib"):
        draw(results, names, Path(options.output) / "together.png")
    return 0


def load(file: Path, options: argparse.Namespace) -> list[Result]:
    """What was measured before with the same options (but for arms and repeats)."""
    if not file.exists():
        return []
    saved = json.loads(file.read_text())
    loose = ("arms", "repeats", "timeout")
    if any(saved["options"].get(k) != v for k, v in vars(options).items() if k not in loose):
        raise SystemExit(f"{file} was measured with other options; choose another --output")
    return [Result(**entry) for entry in saved["results"]]


def _short(result: Result) -> dict[str, Any]:
    entries = asdict(result)
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in entries.items() if k != "reward_by_epoch"}


if __name__ == "__main__":
    sys.exit(main())
