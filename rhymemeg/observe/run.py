"""A run from start to end in this rank: process groups, display, trainer, run directory.

`open_run` starts everything that `rhymemeg.train` needs and closes everything again, also after an error, which
`rhymemeg.parallel.failure` reports once, with the rank and the phase named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.display import Display
from rhymemeg.observe.run_dir import RunDirectory
from rhymemeg.observe.telemetry import Telemetry
from rhymemeg.parallel import failure
from rhymemeg.parallel.runtime import Runtime, init_runtime, shutdown
from rhymemeg.parallel.watchdog import StepBudget
from rhymemeg.rollout.samples import Sample
from rhymemeg.trainer import Trainer


@dataclass
class Run:
    """The parts that the step loop talks to. `directory` is None on every rank but 0."""

    runtime: Runtime
    clock: StepClock
    display: Display
    trainer: Trainer
    directory: RunDirectory | None
    telemetry: Telemetry

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the phases of a step: the clock, and the trace if the step is one of --trace-steps."""
        with self.telemetry.step(step, self.trainer):
            yield

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add times and rates to the step's numbers; write and show them (rank 0)."""
        seconds = self.clock.metrics()
        total, rollout = seconds["perf/step_time"], seconds.get("timing_s/rollout", 0.0)
        tokens = metrics.get("rollout/tokens", 0.0)
        numbers = dict(metrics) | seconds
        numbers["perf/rollout_time"] = rollout
        numbers["perf/rollout_tokens_per_sec"] = tokens / rollout if rollout else 0.0
        numbers["perf/tokens_per_gpu_per_sec"] = (
            (tokens + metrics.get("rollout/prompt_tokens", 0.0)) / total / self.runtime.world_size
        )
        numbers |= self.telemetry.metrics(numbers)
        if (trace := self.telemetry.tracer.write(self.trainer.record)) is not None:
            self.display.note(f"trace of step {step}: {trace} (open in https://ui.perfetto.dev)")
        if self.directory is not None:
            self.directory.log(step, numbers)
        self.display.step(step, numbers)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """The window's line of windows.jsonl, and every --save-samples-interval steps samples/step_N.jsonl with the
        samples that all ranks trained (rank 0 collects and writes)."""
        if self.directory is not None and self.trainer.record is not None:
            self.directory.write_window(self.trainer.record)
        interval = self.trainer.config.run.save_samples_interval
        if not interval or step % interval:
            return
        everyone = self.runtime.gather_object(list(samples), dst=0)
        if self.directory is not None and everyone is not None:
            ordered = sorted((s for part in everyone for s in part), key=lambda s: s.sample_id)
            prompts = [p for at in range(max(step - 1, 0), step + 1) for p in self.trainer.prompts_at(at)]
            prompts += self.trainer.extra_prompts
            self.directory.write_samples(f"step_{step}", ordered, {p.prompt_id: p for p in prompts})

    def stop_if_asked(self, steps_done: int) -> None:
        """After SIGTERM to any rank (preemption): save what is done and end, with a status that says so."""
        if not failure.stop_requested(self.runtime):
            return
        if not self.trainer.checkpoint_is_due(steps_done):
            with self.clock.phase("checkpoint"):
                self.trainer.save(steps_done)
        failure.begin_step(None)
        self.display.note(
            f"stopped by SIGTERM, {steps_done} steps are saved; the same command with --load auto goes on"
        )
        raise SystemExit(failure.PREEMPTED)

    def finish(self) -> None:
        """Evaluate and export the model, write summary.json, and say where everything is."""
        failure.begin_step(None)
        steps = self.trainer.config.run.train_iters
        if self.trainer.first_step < steps and self.trainer.evaluation_is_due(steps):
            with self.clock.phase("evaluate"):
                held_out = self.trainer.evaluate()
            if self.directory is not None:  # a line of its own: the weights after the last step
                self.directory.log(steps, held_out)
        if self.trainer.config.checkpoint.export_hf:
            with self.clock.phase("export"):
                exported = self.trainer.export()
            self.display.note(f"Hugging Face model: {exported}")
        if self.directory is None:
            return
        self.trainer.scheduler.cost.save(self.directory.path / "engine_profile.json")
        summary = self.directory.write_summary("completed")
        first, last = summary["reward_first_5_steps"], summary["reward_last_5_steps"]
        if first is not None:
            self.display.note(
                f"done: {summary['steps']} steps in {summary['seconds']:.0f} s, reward {first:.3f} -> {last:.3f}"
                + _held_out(summary)
            )
        self.display.note(f"run directory: {self.directory.path}")


def _status(error: BaseException) -> str:
    """What the summary of a run says that ended this way."""
    if isinstance(error, SystemExit):
        return "preempted" if error.code == failure.PREEMPTED else "stopped"
    return f"failed: {error}"


def _held_out(summary: Mapping) -> str:
    if "eval_first" not in summary:
        return ""
    before, after = summary["eval_first"], summary["eval_last"]
    return (
        f", held-out {before['eval/reward']:.3f} ± {before['eval/reward_se']:.3f}"
        f" -> {after['eval/reward']:.3f} ± {after['eval/reward_se']:.3f}"
    )


@contextlib.contextmanager
def open_run(config: Config, arch: ModelArch) -> Iterator[Run]:
    """See the module."""
    runtime = init_runtime(config.run, config.parallel, config.run.seed)
    with contextlib.ExitStack() as stack:
        stack.callback(shutdown)
        seconds = 60 * config.run.step_budget_minutes
        budget = StepBudget(seconds, Path(config.run.output_dir) / "stacks", runtime.rank) if seconds else None
        stack.enter_context(failure.guard(runtime, config.run.preemption_grace_seconds, budget))
        first = runtime.rank == 0
        title = f"RhymeMeg  {config.model.hf_checkpoint}  {runtime.world_size} ranks ({runtime.device_type})"
        display = Display(config.run.display if first else "off", config.run.train_iters, title)
        stack.callback(display.close)

        def announce(phase: str) -> None:
            failure.phase(phase)
            display.phase(phase)

        clock = StepClock(on_phase=announce)
        directory: RunDirectory | None = None
        try:
            trainer = Trainer(config, arch, runtime, clock, display)
            stack.callback(trainer.close)
            if first:
                directory = RunDirectory(config, trainer.first_step)
                stack.callback(directory.close)
                directory.write_summary("running")  # what stays if all processes are killed
            telemetry = Telemetry(config, arch, runtime, clock)
            stack.callback(telemetry.close)
            yield Run(runtime, clock, display, trainer, directory, telemetry)
        except BaseException as error:
            failure.report(error)  # now, and not when engine and workers have been closed
            if directory is not None:  # the steps so far are worth a summary whatever ended the run
                directory.write_summary(_status(error))
            raise
