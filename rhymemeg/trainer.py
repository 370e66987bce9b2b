"""The parts of a run, wired together: `Trainer` owns them and has one method for each line of the step loop in
`rhymemeg.train`.

What moves between the methods is the list of this rank's samples. Samples live on the leader rank of the engine that
made them until `learn` brings their tokens to the ranks that train them (`rhymemeg.rl.exchange`); every other rank's
list is empty. Every method is called by all ranks, in the same order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.data.prompts import PromptSet, batch_at, load_prompts
from rhymemeg.data.tokenizer import load_tokenizer
from rhymemeg.errors import CheckpointError, DataError
from rhymemeg.learner import Learner
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.display import Display
from rhymemeg.observe.statistics import (
    EngineWork,
    engine_metrics,
    evaluation_metrics,
    reward_metrics,
    rollout_metrics,
    weighted_means,
)
from rhymemeg.parallel.actor import Actor
from rhymemeg.parallel.checkpoint_folder import CheckpointFolder
from rhymemeg.parallel.reference import ReferenceWeights
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rl.exchange import SampleSummary, share_summaries
from rhymemeg.rl.rewards import Scorer, component_sums
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.samples import Prompt, Sample, SampleId
from rhymemeg.rollout.speculation import Speculation, engine_arguments, tokenizer_digest
from rhymemeg.rollout.window import Progress, assign_samples, run_samples
from rhymemeg.weight_sync.hf_io import export_hf
from rhymemeg.weight_sync.push import WeightSync


class Trainer:
    """Everything that a run holds in this rank. Construction loads the model into the actor and, by a first weight
    sync, into the engine, which serves version 0 afterwards."""

    def __init__(self, config: Config, arch: ModelArch, runtime: Runtime, clock: StepClock, display: Display) -> None:
        self.config, self.arch, self.runtime, self.clock, self.display = config, arch, runtime, clock, display
        self._stack = contextlib.ExitStack()
        self.engine_work: list[EngineWork] = []
        self.engine_of: dict[int, int] = {}
        with clock.phase("loading prompts"):
            self.tokenizer = load_tokenizer(config.model.hf_checkpoint)
            limit, arguments = config.rollout.max_prompt_len, config.data.reward_args
            self.prompts = load_prompts(config.data, self.tokenizer, max_prompt_len=limit)
            self.scorer = Scorer.from_options(config.data, self.prompts.default_reward, arguments)
            self._stack.callback(self.scorer.close)
            self.held_out: PromptSet | None = None
            if config.data.eval_interval:
                self.held_out = load_prompts(config.data, self.tokenizer, max_prompt_len=limit, evaluation=True)
                self.held_out_scorer = Scorer.from_options(config.data, self.held_out.default_reward, arguments)
                self._stack.callback(self.held_out_scorer.close)
            self._check_same_prompts()
        with clock.phase("loading the actor"):
            self.actor = Actor(config, arch, runtime)
            self.reference: ReferenceWeights | None = None
            if config.algorithm.kl_loss_coef > 0:
                self.actor.load_weights(config.model.ref_hf_checkpoint or config.model.hf_checkpoint)
                self.reference = ReferenceWeights(self.actor.chunks)
            self.learner = Learner(config, arch, runtime, clock, self.actor, self.reference)
            self.checkpoints = CheckpointFolder(Path(config.run.output_dir) / "checkpoints", config.checkpoint, runtime)
            self.first_step = self._load_actor()
            if self.first_step >= config.run.train_iters:
                display.note(
                    f"no step to do: --train-iters is {config.run.train_iters}, and {self.first_step} are done"
                )
        with clock.phase("starting the engine"):
            # The engine starts without weights: what it serves always comes from the actor.
            drafting = engine_arguments(config.histospec, config.engine.vllm_max_num_seqs)
            self.engine = RolloutEngine.start(config, arch, runtime, self.tokenizer, load_format="dummy", **drafting)
            self._stack.callback(self.engine.close)
            self.speculation = self._start_speculation() if config.histospec.histospec else None
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
        folder = self.checkpoints.to_load()
        if folder is None:
            self.actor.load_weights(self.config.model.hf_checkpoint)
            return 0
        state = self.actor.load_checkpoint(folder)
        if state["prompts"] != self.prompts.fingerprint:
            raise CheckpointError(f"{folder} was trained on other prompts than --prompt-data names now")
        self.display.note(f"resuming from {folder}: step {state['step']} of {self.config.run.train_iters}")
        return int(state["step"])

    def _start_speculation(self) -> Speculation:
        folder, file = self.config.model.hf_checkpoint, self.config.histospec.histospec_warm_start
        digest = tokenizer_digest(folder)
        speculation = Speculation(self.config.histospec, self.arch, self.engine, self.runtime, digest)
        if file:
            prompts = [self.prompts[i] for i in range(len(self.prompts))]
            known = speculation.warm_start(file, prompts, self.tokenizer.encode)
            self.display.note(f"history of {known} of {len(prompts)} prompts from {file}")
        return speculation

    # ------------------------------------------------------------------------------------------------------- rollout

    def prompts_at(self, step: int) -> list[Prompt]:
        """The prompts of a step: each epoch visits every prompt once, in an order of its own."""
        indices = batch_at(
            step,
            self.config.rollout.rollout_batch_size,
            self.config.run.seed,
            self.config.data.shuffle,
            len(self.prompts),
        )
        return [self.prompts[i] for i in indices]

    def rollout(self, step: int, prompts: Sequence[Prompt]) -> list[Sample]:
        """Sample a group of responses to each prompt; returns those of this rank's engine, on its leader."""
        return self._generate(
            step,
            prompts,
            self.config.rollout.n_samples_per_prompt,
            self.config.run.seed,
            self.config.rollout.temperature,
        )

    def _generate(
        self, step: int, prompts: Sequence[Prompt], samples_per_prompt: int, seed: int, temperature: float
    ) -> list[Sample]:
        samples = [
            Sample(SampleId(step, prompt.prompt_id, k), prompt.token_ids)
            for prompt in prompts
            for k in range(samples_per_prompt)
        ]
        queues = assign_samples(samples, self.engine.num_engines)
        queue = queues[self.engine.engine_index]
        self.engine_of = {s.sample_id.prompt_id: e for e, part in enumerate(queues) for s in part}
        if self.speculation is not None:
            self.speculation.begin(prompts, self.engine_of)

        steps = 0

        def progress(now: Progress) -> None:
            self.display.progress(f"{now.finished}/{len(queue)} samples, {now.tokens:,} tokens, {now.running} running")

        def count(engine: RolloutEngine) -> bool:
            nonlocal steps
            steps += engine.has_unfinished()
            return False

        started = time.perf_counter()
        finished = run_samples(
            self.engine,
            queue,
            SamplingOptions.from_config(self.config.rollout, temperature),
            seed,
            timeout=60 * self.config.rollout.rollout_timeout_minutes,
            progress=progress,
            between_steps=count,
        )
        # Waiting for the slowest engine belongs to the rollout, and is what the idle share measures.
        work = EngineWork(self.engine.engine_index, steps, time.perf_counter() - started)
        self.engine_work = self.runtime.all_gather_object(work)
        return finished

    def score(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt]
    ) -> tuple[list[SampleSummary], dict[str, float]]:
        """Judge this rank's samples. Returns the summaries of all ranks' samples and what they say of the step."""
        self.scorer.score(samples, prompts)
        summaries = share_summaries(samples, self.runtime)
        components = weighted_means(self.runtime.all_gather_object(component_sums(samples)))
        metrics = components | reward_metrics(summaries) | rollout_metrics(summaries) | engine_metrics(self.engine_work)
        return summaries, metrics

    def record(self, step: int, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> dict[str, float]:
        """Keep the step's samples as history for the next epoch."""
        if self.speculation is None:
            return {}
        return self.speculation.end(step, samples, prompts, self.engine_of)

    # ------------------------------------------------------------------------------------------- after the training phase

    def push_weights(self, version: int) -> dict[str, float]:
        """Every engine serves the actor's weights as `version` when this returns. The engine's memory comes back in two
        parts, so that old weights, new weights and the KV cache are never on the device together."""
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
        assert self.held_out is not None
        data = self.config.data
        prompts = [self.held_out[i] for i in range(len(self.held_out))]
        samples = self._generate(0, prompts, data.eval_n_samples, self.config.run.seed + 1, data.eval_temperature)
        if self.speculation is not None:
            self.speculation.forget()  # no history of held-out prompts
        self.held_out_scorer.score(samples, prompts)
        summaries = share_summaries(samples, self.runtime)
        components = weighted_means(self.runtime.all_gather_object(component_sums(samples)))
        renamed = {f"eval/{name.removeprefix('reward/')}": value for name, value in components.items()}
        return renamed | evaluation_metrics(summaries)

    def checkpoint_is_due(self, steps_done: int) -> bool:
        """Every --save-interval steps, and after the last if --save-final."""
        options, last = self.config.checkpoint, steps_done == self.config.run.train_iters
        return (options.save_interval > 0 and steps_done % options.save_interval == 0) or (last and options.save_final)

    def save(self, steps_done: int) -> None:
        """Write a checkpoint from which a run continues at step `steps_done`."""
        state = {"step": steps_done, "prompts": self.prompts.fingerprint, "config": self.config.model_dump(mode="json")}
        self.checkpoints.save(self.actor, steps_done, state)

    def export(self) -> Path:
        """Write the actor as a Hugging Face folder into the run directory."""
        folder = Path(self.config.run.output_dir) / "hf"
        export_hf(self.actor.chunks, self.arch, self.runtime, folder, self.config.model.hf_checkpoint)
        return folder

    def learn(self, step: int, samples: Sequence[Sample], summaries: Sequence[SampleSummary]) -> dict[str, float]:
        """The training phase of `step` (`rhymemeg.learner`)."""
        self.engine.sleep()  # the device is the actor's until the next weight update; without sleep mode nothing happens
        return self.learner.learn(samples, summaries, version=step)
