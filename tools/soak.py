"""Whether a long run grows: memory, open files and threads of each rank over the steps of a tiny run.

    python tools/soak.py --steps 1000 --output-dir runs/soak

Trains the quickstart model on very small steps, with drafting from history and a checkpoint every 20 steps, and reads /proc
every half second. Writes soak.json (samples and slopes), soak.svg (a plot) and prints a table: for each rank the level after
warm-up and at the end, and the slope of a straight line through all samples after warm-up, per 1,000 steps. Memory is what
the rank alone holds (`RssAnon`: not the code and files that processes share). `--warm-up` steps at the start are left out,
as caches and the history fill up then.

Exit status 1 if the run fails or something grows: memory by more than `--max-mib` per 1,000 steps, or any file or thread
more at the end than after warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUANTITIES = ("rss_mib", "files", "threads")
OPTIONS = (
    "--config", "launch/configs/quickstart.yaml", "--display", "lines", "--tensorboard", "False", "--export-hf", "False",
    "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--max-response-len", "24", "--num-prompts", "16",
    "--max-prompt-len", "192", "--eval-interval", "0", "--histospec", "--save-interval", "20", "--keep-last", "1",
)  # fmt: skip


def ranks_of(agent: int) -> dict[int, int]:
    """Rank -> process id of the children of torchrun."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"PPid:\t{agent}\n" in (folder / "status").read_text():
                for item in (folder / "environ").read_bytes().split(b"\0"):
                    if item.startswith(b"RANK="):
                        found[int(item[5:])] = int(folder.name)
        except OSError:
            continue
    return found


def sample(pid: int) -> dict[str, float] | None:
    """Memory in MiB, open files and threads of a process."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        memory = int(status["RssAnon"].split()[0]) / 1024
        return {"rss_mib": memory, "files": len(os.listdir(folder / "fd")), "threads": int(status["Threads"])}
    except (OSError, KeyError):
        return None


def steps_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def watch(folder: Path, steps: int, words: Sequence[str], timeout: float) -> tuple[int | None, list[dict[str, Any]]]:
    """Run to the end; returns the exit status and the samples {step, rank, ...}."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module"]
    command += ["rhymemeg.train", *OPTIONS, "--train-iters", str(steps), "--output-dir", str(folder), *words]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    samples: list[dict[str, Any]] = []
    with (folder / "run.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + timeout
        ranks: dict[int, int] = {}
        while process.poll() is None and time.monotonic() < deadline:
            done = steps_done(folder)
            if done and len(ranks) < 2:
                ranks = ranks_of(process.pid)
            for rank, pid in ranks.items():
                facts = sample(pid) if done < steps else None  # what the end frees is not of interest
                if facts is not None:
                    samples.append({"step": done, "rank": rank, **facts})
            time.sleep(0.5)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait() if time.monotonic() < deadline else None, samples


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line with the least squares."""
    x, y = [p[0] for p in points], [p[1] for p in points]
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else 0.0


def summarise(samples: Sequence[dict[str, Any]], warm_up: int) -> list[dict[str, Any]]:
    """Per rank and quantity: medians of the first and last tenth after warm-up, slope per 1,000 steps."""
    rows = []
    for rank in sorted({s["rank"] for s in samples}):
        mine = [s for s in samples if s["rank"] == rank and s["step"] >= warm_up]
        for name in QUANTITIES:
            values = [s[name] for s in mine]
            tenth = max(1, len(values) // 10)
            if values:
                rows.append({
                    "rank": rank, "quantity": name, "first": statistics.median(values[:tenth]),
                    "last": statistics.median(values[-tenth:]),
                    "per_1000_steps": 1000 * slope([(s["step"], s[name]) for s in mine]),
                })  # fmt: skip
    return rows


def plot(samples: Sequence[dict[str, Any]], warm_up: int, file: Path) -> None:
    """Three panels, a line a rank."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 1, sharex=True, figsize=(8, 7), layout="constrained")
    for panel, name, label in zip(panels, QUANTITIES, ("memory of its own, MiB", "open files", "threads")):
        for rank in sorted({s["rank"] for s in samples}):
            mine = [s for s in samples if s["rank"] == rank]
            panel.plot([s["step"] for s in mine], [s[name] for s in mine], label=f"rank {rank}", linewidth=1)
        panel.axvline(warm_up, color="grey", linestyle=":", linewidth=1)
        panel.set_ylabel(label)
    panels[0].legend()
    panels[-1].set_xlabel("training step")
    figure.savefig(file)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Whether a long run grows.")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs/soak")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--max-mib", type=float, default=50.0, help="allowed growth of memory per 1,000 steps")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds")
    parser.add_argument("words", nargs="*", help="further options of rhymemeg.train, after --")
    options = parser.parse_args(argv)
    folder: Path = options.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    status, samples = watch(folder, options.steps, options.words, options.timeout)
    rows = summarise(samples, options.warm_up)
    (folder / "soak.json").write_text(json.dumps({"status": status, "rows": rows, "samples": samples}))
    try:
        plot(samples, options.warm_up, folder / "soak.svg")
    except ImportError:
        print("no plot: matplotlib is not installed")
    print(f"exit status {status}, {steps_done(folder)} steps, {len(samples)} samples")
    print(f"{'rank':>4} {'quantity':<8} {'first':>9} {'last':>9} {'per 1,000 steps':>16}")
    for r in rows:
        print(f"{r['rank']:>4} {r['quantity']:<8} {r['first']:9.1f} {r['last']:9.1f} {r['per_1000_steps']:16.2f}")
    grown = [
        r for r in rows
        if (r["per_1000_steps"] > options.max_mib if r["quantity"] == "rss_mib" else r["last"] > r["first"])
    ]  # fmt: skip
    for r in grown:
        print(f"GROWS: {r['quantity']} of rank {r['rank']}")
    return int(bool(grown) or status != 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
