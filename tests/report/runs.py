"""Run directories made for tests: metrics as a run of the trainer writes them, windows from the simulator."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np

from rhymemeg.histopipe.record import WindowRecord, write_windows
from rhymemeg.histopipe.simulator import Setting, simulate
from rhymemeg.histopipe.workloads import Lognormal

PHASES = {"rollout": 1.8, "train": 2.2, "sync": 0.04, "reward": 0.02, "batch": 0.01, "log": 0.008, "other": 0.001}


def make_run(
    folder: Path,
    steps: int,
    engines: int = 0,
    *,
    seed: int = 0,
    histospec: bool = True,
    simulated: int = 4,
    slots: int = 16,
    scale: dict[str, float] | None = None,
) -> Path:
    """`engines` 0: without windows. `simulated` windows come from the simulator and are repeated with the idle times of
    each repetition drawn anew. `scale`: factors on the seconds of phases."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    windows = windows_of(engines, simulated, slots, seed) if engines else []
    records: list[WindowRecord] = []
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(steps):
            tokens = float(rng.integers(9_000, 12_000))
            row: dict[str, float | None] = {"step": step}
            for name, seconds in PHASES.items():
                work = tokens / 10_000 if name in ("rollout", "train") else 1.0
                row[f"timing_s/{name}"] = seconds * work * float(rng.lognormal(0, 0.03)) * (scale or {}).get(name, 1.0)
            row["perf/step_time"] = sum(v for k, v in row.items() if k.startswith("timing_s/") and v)
            row |= {
                "reward/mean": 0.9 - 0.5 * float(np.exp(-step / 200)) + float(rng.normal(0, 0.03)),
                "reward/accuracy": 0.5,
                "rollout/tokens": tokens,
                "rollout/prompt_tokens": 2560.0,
                "rollout/samples": 128.0,
                "rollout/engine_steps": 400.0,
                "rollout/response_len_mean": tokens / 128,
                "rollout/response_len_max": 300.0,
                "rollout/idle_share": 0.1,
                "perf/rollout_tokens_per_sec": tokens / 1.8,
                "perf/tokens_per_gpu_per_sec": 1700.0,
                "actor/grad_norm": None if step == 3 else 0.1,
                "actor/train_rollout_logprob_abs_diff": 2e-7,
            }
            if histospec:
                row |= {
                    "histospec/acceptance": 0.5,
                    "histospec/coverage": 0.8,
                    "histospec/tokens_per_request_step": 3.0,
                }
            if step % 20 == 0:
                row |= {"eval/reward": 0.5 + step / (2 * steps), "eval/reward_se": 0.03}
            if windows:
                record = windows[step % len(windows)]
                idle = np.clip(np.array(record.idle_seconds) * rng.lognormal(0, 0.3, engines), 0, record.seconds)
                record = dataclasses.replace(record, step=step, idle_seconds=tuple(idle.tolist()))
                records.append(record)
                row |= record.metrics()
            file.write(json.dumps(row) + "\n")
    if records:
        write_windows(folder / "windows.jsonl", records)
    (folder / "config.yaml").write_text(
        "model:\n  hf_checkpoint: models/small\nrun:\n  train_iters: 3\n", encoding="utf-8"
    )
    (folder / "summary.json").write_text('{"status": "completed", "versions": {"torch": "2.13.0"}}', encoding="utf-8")
    return folder


def windows_of(engines: int, number: int, slots: int, seed: int) -> list[WindowRecord]:
    """Simulated windows with the spans of up to 32 engines."""
    setting = Setting(engines=engines, slots=slots, samples=4, carry=0.1, cap=4096, span_engines=32, seed=seed)
    prompts = max(4, engines * slots // 4)
    return simulate(setting, itertools.islice(Lognormal().steps(prompts, 4, 4096, seed), number + 1), number)
