"""The parts of a run, wired together: `Trainer` owns them and has one method for each line of the step loop in
`rhymemeg.train`.

What moves between the methods is the list of this rank's samples. Samples live on the leader rank of the engine that
made them until `learn` brings their tokens to the ranks that train them (`rhymemeg.rl.exchange`); every other rank's
list is empty. Every method is called by all ranks, in the same order.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.data.prompts import batch_at, load_prompts
from rhymemeg.data.tokenizer import load_tokenizer
from rhymemeg.errors import CheckpointError, DataError
from rhymemeg.evaluation import HeldOut, combine, load_held_out
from rhymemeg.histopipe.cost import cost_model
from rhymemeg.histopipe.record import WindowRecord
from rhymemeg.histopipe.scheduler import Scheduler, SchedulerOptions
from rhymemeg.learner import Learner
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.display import Display
from rhymemeg.observe.statistics import reward_metrics, rollout_metrics, weighted_means
from rhymemeg.parallel import resume
from rhymemeg.parallel.actor import Actor
from rhymemeg.parallel.checkpoint_folder import CheckpointFolder
from rhymemeg.parallel.critic import Critic
from rhymemeg.parallel.offload import Offload
from rhymemeg.parallel.reference import ReferenceWeights
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rl.dynamic_sampling import GroupFilter, replacement_indices
from rhymemeg.rl.exchange import SampleSummary, share_summaries
from rhymemeg.rl.groups import GroupBuffer
from rhymemeg.rl.rewards import Scorer, component_sums
from rhymemeg.rollout.board import open_board
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.rollouts import Rollouts, WindowLimits
from rhymemeg.rollout.samples import Prompt, Sample, SampleId
from rhymemeg.rollout.speculation import Speculation, engine_arguments, tokenizer_digest
from rhymemeg.rollout.window import Progress
from rhymemeg.rollout.wire import pack_samples, unpack_samples
from rhymemeg.weight_sync.hf_io import export_hf
from rhymemeg.weight_sync.push import WeightSync


@dataclass(frozen=True)
class Batch:
    """What a step trains: this rank's `samples`, everyone's `summaries` of such samples, and `siblings`, members of the same
    groups that were trained before."""

    samples: list[Sample]
    summaries: list[SampleSummary]
    siblings: list[SampleSummary]


class Trainer:
    """Everything that a run holds in this rank. Construction loads the model into the actor and, by a first weight
    sync, into the engine, which serves version 0 afterwards."""

    def __init__(self, config: Config, arch: ModelArch, runtime: Runtime, clock: StepClock, display: Display) -> None:
        self.config, self.arch, self.runtime, self.clock, self.display = config, arch, runtime, clock, display
        self._stack = contextlib.ExitStack()
        self.record: WindowRecord | None = None
        """The last window of training samples; spans are on rank 0 only."""
        self.extra_prompts: list[Prompt] = []
        """Prompts that this step sampled in place of its own (dynamic sampling)."""
        with clock.phase("loading prompts"):
            self.tokenizer = load_tokenizer(config.model.hf_checkpoint)
            limit, arguments = config.rollout.max_prompt_len, config.data.reward_args
            self.prompts = load_prompts(config.data, self.tokenizer, max_prompt_len=limit)
            self.scorer = Scorer.from_options(config.data, self.prompts.default_reward, arguments)
            self._stack.callback(self.scorer.close)
            self.held_out = load_held_out(config, self.tokenizer)
            for one in self.held_out:
                self._stack.callback(one.scorer.close)
            self._check_same_prompts()
        with clock.phase("loading the actor"):
            self.actor = Actor(config, arch, runtime)
            self.reference: ReferenceWeights | None = None
            if config.algorithm.needs_reference:
                self.actor.load_weights(config.model.ref_hf_checkpoint or config.model.hf_checkpoint)
                self.reference = ReferenceWeights(self.actor.chunks)
            self.critic = Critic(config, arch, runtime) if config.algorithm.needs_critic else None
            self.learner = Learner(config, arch, runtime, clock, self.actor, self.reference, self.critic)
            self.offload = Offload([m for m in (self.actor, self.critic) if m is not None], config.sync)
            self.checkpoints = CheckpointFolder(Path(config.run.output_dir) / "checkpoints", config.checkpoint, runtime)
            self.first_step = self._load_actor()
        with clock.phase("starting the engine"):
            # The engine starts without weights: what it serves always comes from the actor.
            drafting = engine_arguments(config.histospec, config.engine)
            self.engine = RolloutEngine.start(config, arch, runtime, self.tokenizer, load_format="dummy", **drafting)
            self._stack.callback(self.engine.close)
            self.speculation = self._start_speculation() if config.histospec.histospec else None
            self._start_rollouts()
            self._resume_rollouts()
        with clock.phase("first weight sync"):
            self.sync = WeightSync(arch, config.sync, runtime, self.actor.chunks, self.engine)
            self.sync.push(self.first_step)

    def close(self) -> None:
        """End worker processes and the engine."""
        self._stack.close()

    def _check_same_prompts(self) -> None:
        """All ranks plan from their own copy of the prompts, so the copies must be equal."""
        prints = self.runtime.all_gather_object(self.prompts.fingerprint)
        different = [rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]]
        if different:
            raise DataError(
                f"--prompt-data {self.config.data.prompt_data}: rank {different[0]} has other prompts than rank 0 (is the file "
                "the same on all hosts, and the generator independent of PYTHONHASHSEED?)"
            )

    def _load_actor(self) -> int:
        """Weights from the checkpoint to resume, or else from the model folder. Returns the first step to do."""
        steps = 0
        self._resumed = self.checkpoints.load(self.actor, self.critic)
        if self._resumed is None:
            self.actor.load_weights(self.config.model.hf_checkpoint)
            if self.critic is not None:
                self.critic.load_weights(self.config.model.hf_checkpoint)
        else:
            folder, state = self._resumed
            if state["prompts"] != self.prompts.fingerprint:
                raise CheckpointError(f"{folder} was trained on other prompts than --prompt-data names now")
            steps = int(state["step"])
            now = self.config.model_dump(mode="json")
            for remark in resume.check(folder, state["config"], now):
                self.display.note(remark)
            self._say(resume.describe(folder, steps, state["config"], now, len(self.prompts)))
        self.checkpoints.begin(steps)
        for warning in self.checkpoints.warnings:
            self._say(warning)
        if self._resumed is None and self.config.checkpoint.load:
            self.display.note(f"no checkpoint in {self.checkpoints.path} yet: starting afresh")
        if self._resumed is None and self.config.run.train_iters == 0:
            self._say("no step to do: --train-iters is 0")
        return steps

    def _say(self, text: str) -> None:
        """Tell what must not go unsaid, also without a display."""
        if self.config.run.display == "off" and self.runtime.is_rank0:
            print(f"rhymemeg: {text}", file=sys.stderr, flush=True)
        self.display.note(text)

    def _start_speculation(self) -> Speculation:
        folder, file = self.config.model.hf_checkpoint, self.config.histospec.histospec_warm_start
        digest = tokenizer_digest(folder)
        speculation = Speculation(self.config.histospec, self.arch, self.engine, self.runtime, digest)
        if file:
            prompts = [self.prompts[i] for i in range(len(self.prompts))]
            known = speculation.warm_start(file, prompts, self.tokenizer.encode)
            self.display.note(f"history of {known} of {len(prompts)} prompts from {file}")
        return speculation

    def _start_rollouts(self) -> None:
        """The scheduler and the windows. Evaluation has windows of its own, since a window ends with what is paused."""
        config, h = self.config, self.config.histopipe
        self.scheduler = self._scheduler(config.rollout.n_samples_per_prompt)
        board = open_board(self.runtime, self.engine)
        limits = WindowLimits(
            timeout=60 * config.rollout.rollout_timeout_minutes,
            silence=60 * config.run.distributed_timeout_minutes,
            steal=h.histopipe_steal,
        )

        def progress(now: Progress) -> None:
            self.display.progress(f"{now.finished} samples, {now.tokens:,} tokens, {now.running} running")

        self.rollouts, self.evaluations = (
            Rollouts(self.engine, self.runtime, board, self.speculation, limits, progress) for _ in range(2)
        )
        self.groups = GroupBuffer(config.rollout.n_samples_per_prompt, h.histopipe_groups)
        self._held: dict[SampleId, Sample] = {}  # complete and judged, not trained yet

    def _scheduler(self, samples_per_prompt: int, **changes: Any) -> Scheduler:
        h = self.config.histopipe
        options: dict[str, Any] = {
            "policy": h.histopipe_policy,
            "layout": h.histopipe_layout,
            "carry": h.histopipe_carry,
            "early": h.histopipe_early,
            "ranking_groups": h.histopipe_ranking_groups,
            "outliers": h.histopipe_policy == "paper",
        }
        return Scheduler(
            SchedulerOptions(**(options | changes)),
            num_engines=self.engine.num_engines,
            slots=self.engine.spec.max_num_seqs,
            samples_per_prompt=samples_per_prompt,
            max_response_len=self.config.rollout.max_response_len,
            seed=self.config.run.seed,
            cost=None if h.histopipe_profile == "measured" else cost_model(h.histopipe_profile),
        )

    # ------------------------------------------------------------------------------------------------------- rollout

    def prompts_at(self, step: int) -> list[Prompt]:
        """The prompts of a step: each epoch visits every prompt once, in an order of its own."""
        return [self.prompts[i] for i in self._indices_at(step)]

    def _indices_at(self, step: int) -> Sequence[int]:
        config = self.config
        return batch_at(
            step, config.rollout.rollout_batch_size, config.run.seed, config.data.shuffle, len(self.prompts)
        )

    def rollout(self, step: int, prompts: Sequence[Prompt]) -> list[Sample]:
        """Run the window of a step. Returns the samples that are complete with it, on the leaders of their engines: those
        of this step, but for what the window leaves to the next, and those that the last one left."""
        config = self.config
        last = step + 1 >= config.run.train_iters
        window = self.rollouts.window(
            self.scheduler,
            step,
            prompts,
            SamplingOptions.from_config(config.rollout, config.rollout.temperature),
            config.run.seed,
            next_prompts=self.prompts_at(step + 1) if config.histopipe.histopipe_early and not last else (),
            strict=last,
            judge=self.scorer,
        )
        self.record = window.record
        return window.finished

    def score(self, step: int, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> tuple[Batch, dict[str, float]]:
        """Judge this rank's new samples. Returns what is to be trained in this step, and what the samples say of it."""
        assert self.record is not None
        known = {p.prompt_id: p for p in prompts}
        if self.record.carried_in:  # of the step before, or of this step's window before where a step has several
            known |= {p.prompt_id: p for at in (step - 1, step) if at >= 0 for p in self.prompts_at(at)}
        self.scorer.score(samples, known)
        complete = share_summaries(samples, self.runtime)
        self._held |= {s.sample_id: s for s in samples}
        summaries, siblings = self.groups.add(complete)
        mine = [self._held.pop(s.sample_id) for s in summaries if s.holder == self.runtime.rank]
        components = weighted_means(self.runtime.all_gather_object(component_sums(mine)))
        metrics = components | reward_metrics(summaries) | rollout_metrics(complete) | self.record.metrics()
        metrics["rollout/tokens"] = float(self.record.generated_tokens)
        if self.config.histopipe.histopipe_carry:
            metrics["histopipe/waiting_samples"] = float(self.groups.waiting)
        return Batch(mine, summaries, siblings), metrics

    def refill(self, step: int, batch: Batch, metrics: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        """Dynamic sampling: groups of equal rewards are replaced by groups of new prompts, in further rollouts. Rewards and
        lengths of the step's own prompts remain its metrics; tokens are added up."""
        config = self.config
        groups = GroupFilter(config.rollout.rollout_batch_size, config.algorithm.dynamic_sampling_max_rounds)
        groups.add(batch.summaries)
        samples, used = list(batch.samples), set(self._indices_at(step))
        self.extra_prompts = []
        sampling = SamplingOptions.from_config(config.rollout, config.rollout.temperature)
        while wanted := groups.wanted():
            indices = replacement_indices(config.run.seed, step, groups.rounds, wanted, len(self.prompts), used)
            if not indices:
                break
            used |= set(indices)
            prompts = [self.prompts[i] for i in indices]
            self.extra_prompts += prompts
            with self.clock.phase("rollout"):
                window = self.rollouts.window(
                    self.scheduler, step, prompts, sampling, config.run.seed, strict=True, judge=self.scorer
                )
            with self.clock.phase("reward"):
                more, numbers = self.score(step, window.finished, prompts)
                metrics = metrics | self.remember(step, window.finished)
            for name in ("rollout/tokens", "rollout/prompt_tokens", "rollout/samples"):
                metrics[name] += numbers[name] if name != "rollout/tokens" else window.record.generated_tokens
            groups.add(more.summaries)
            samples += more.samples
        if groups.shortage():
            self.display.note(f"step {step} {groups.shortage()}")
        kept = groups.kept()
        trained = {s.sample_id for s in kept}
        return Batch([s for s in samples if s.sample_id in trained], kept, []), metrics | groups.metrics()

    def remember(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Keep new samples as history for the next epoch."""
        if self.speculation is None:
            return {}
        metrics = self.speculation.record(samples, self._next_uses(step + 1))
        if self.speculation.warning is not None:
            self.display.note(f"step {step}: {self.speculation.warning}")
        return metrics

    def _next_uses(self, step: int) -> Iterator[int]:
        """Ids of all prompts in the order in which they will be sampled again, from `step` on."""
        size, count = self.config.rollout.rollout_batch_size, len(self.prompts)
        for later in range(step, step + -(-count // size) + 1):
            for i in self._indices_at(later):
                yield self.prompts.prompt_id(i)

    # ------------------------------------------------------------------------------------------- after the training phase

    def push_weights(self, version: int) -> dict[str, float]:
        """Every engine serves the actor's weights as `version` when this returns. The engine's memory comes back in two
        parts, so that old weights, new weights and the KV cache are never on the device together."""
        self.offload.release()
        self.engine.wake(["weights"])
        metrics = self.sync.push(version)
        self.engine.wake(["kv_cache"])
        return metrics

    def evaluation_is_due(self, step: int) -> bool:
        """Before every --eval-interval-th step, the first included, and after the last."""
        interval = self.config.data.eval_interval
        return interval > 0 and (step % interval == 0 or step == self.config.run.train_iters)

    def evaluate(self) -> dict[str, float]:
        """Sample and judge the held-out prompts with the weights that the engines have now: `eval/*`. The seeds are the
        same at every evaluation, so that the difference between two is less noisy than either."""
        return combine([(one, self._evaluate(one)) for one in self.held_out])

    def _evaluate(self, held_out: HeldOut) -> dict[str, float]:
        data, prompts = held_out.options, held_out.all_prompts()
        samples = self.evaluations.window(
            self._scheduler(data.eval_n_samples, policy="complement", outliers=False, carry=0.0, early=0.0),
            0,
            prompts,
            SamplingOptions.from_config(self.config.rollout, data.eval_temperature),
            self.config.run.seed + 1,
            judge=held_out.scorer,
        ).finished
        if self.speculation is not None:
            self.speculation.forget()  # no history of held-out prompts
        held_out.scorer.score(samples, prompts)
        summaries = share_summaries(samples, self.runtime)
        return held_out.metrics(summaries, weighted_means(self.runtime.all_gather_object(component_sums(samples))))

    def checkpoint_is_due(self, steps_done: int) -> bool:
        """Every --save-interval steps, and after the last if --save-final."""
        options, last = self.config.checkpoint, steps_done == self.config.run.train_iters
        return (options.save_interval > 0 and steps_done % options.save_interval == 0) or (last and options.save_final)

    def save(self, steps_done: int) -> None:
        """Write a checkpoint from which a run continues at step `steps_done`, with everything that outlives a step:
        weights and optimizer, scheduler, samples that are paused or wait for their group, history."""
        state = {
            "step": steps_done,
            "prompts": self.prompts.fingerprint,
            "config": self.config.model_dump(mode="json"),
            "scheduler": self.scheduler.state(),
            "groups": self.groups.state(),
        }
        files = {"samples": pack_samples([*self.rollouts.held(), *self._held.values()])}
        if self.speculation is not None:
            files["history"] = self.speculation.save()
        self.engine.sleep()  # a checkpoint is written from the device, where the optimizer's state has to fit
        self.offload.restore()
        self.checkpoints.save(self.actor, steps_done, state, files, self.critic)
        self.offload.release()
        self.engine.wake()

    def _resume_rollouts(self) -> None:
        """What `save` kept beside the actor."""
        if self._resumed is None:
            return
        folder, state = self._resumed
        self.scheduler.restore(state["scheduler"])
        paused: list[Sample] = []
        for _, data in self.checkpoints.load_files(folder, "samples"):
            for sample in unpack_samples(data):
                if sample.finish_reason is None or sample.sample_id in self.scheduler.complete_early:
                    paused.append(sample)
                elif sample.sample_id.prompt_id % self.runtime.world_size == self.runtime.rank:
                    self._held[sample.sample_id] = sample
        self.rollouts.restore(paused, self.scheduler)
        for sample in (*self._held.values(), *self.rollouts.finished_early):
            sample.text = self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        held = self.runtime.all_gather_object(list(self._held))
        self.groups.restore(state["groups"], {sid: rank for rank, ids in enumerate(held) for sid in ids})
        if self.speculation is not None:
            self.speculation.restore(data for _, data in self.checkpoints.load_files(folder, "history"))

    def export(self) -> Path:
        """Write the actor as a Hugging Face folder into the run directory."""
        folder = Path(self.config.run.output_dir) / "hf"
        export_hf(self.actor.chunks, self.arch, self.runtime, folder, self.config.model.hf_checkpoint)
        return folder

    def learn(self, step: int, batch: Batch) -> dict[str, float]:
        """The training phase of `step` (`rhymemeg.learner`); nothing where every group still waits for a carried sample."""
        self.engine.sleep()  # the device is the actor's until the next weight update; without sleep mode nothing happens
        self.offload.restore()
        if not batch.summaries:
            if not self.config.algorithm.dynamic_sampling:  # which has said so
                self.display.note(f"step {step}: nothing to train, every group waits for a carried sample")
            return {}
        return self.learner.learn(batch.samples, batch.summaries, version=step, siblings=batch.siblings)
