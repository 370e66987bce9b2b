"""The training phase: from the samples of a rollout to optimizer steps.

    learner = Learner(config, arch, runtime, clock, actor, reference, critic)
    metrics = learner.learn(samples, summaries, version)        # all ranks

`samples` are those that this rank holds, `summaries` everyone's (the same list on every rank). From the summaries each
rank makes the same plan: optimizer steps, micro-batches of every data-parallel rank. Then one exchange brings the tokens
to the ranks that train them, forward passes add the log-probabilities that the algorithm wants and a critic's values, and
rewards become advantages (`rhymemeg.rl.credit`). A critic takes as many optimizer steps as the actor, on the same
micro-batches, and alone in the first `--critic-warmup-steps`.

A *group* are the samples of one prompt in one step, and its members are compared with each other. `siblings` are
members whose rewards count in the advantages of their group but that are not trained in this call; with
`--overlong-filtering` truncated samples are such members, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.errors import TrainingError
from rhymemeg.observe.clock import StepClock
from rhymemeg.parallel.actor import Actor
from rhymemeg.parallel.critic import Critic
from rhymemeg.parallel.reference import ReferenceWeights
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rl.batching import MicroBatch, TrainSample, collate, plan_micro_batches, spread_fields
from rhymemeg.rl.corrections import MAXIMA, MISMATCH, finish_metrics, is_corrected
from rhymemeg.rl.credit import StepRewards, assign_credit
from rhymemeg.rl.exchange import SampleSummary, exchange, exchange_routing
from rhymemeg.rl.losses import aggregation_weights
from rhymemeg.rl.objective import Objective
from rhymemeg.rl.rewards.length import overlong_penalty
from rhymemeg.rl.values import ValueObjective, finish_value_metrics
from rhymemeg.rollout.routing import replayable
from rhymemeg.rollout.samples import Sample, SampleId


@dataclass(frozen=True)
class MiniBatch:
    """The plan of one optimizer step, the same on every rank. `members` index the summaries of those that are trained;
    `plan` is [data-parallel rank][micro-batch] -> indices; `weights` of each member are those of each of its tokens."""

    members: list[int]
    plan: list[list[list[int]]]
    weights: dict[int, float]
    total_tokens: int


class Learner:
    """See the module."""

    def __init__(
        self,
        config: Config,
        arch: ModelArch,
        runtime: Runtime,
        clock: StepClock,
        actor: Actor,
        reference: ReferenceWeights | None,
        critic: Critic | None = None,
    ) -> None:
        self.config, self.arch, self.runtime, self.clock = config, arch, runtime, clock
        self.actor, self.reference, self.critic = actor, reference, critic

    def learn(
        self,
        samples: Sequence[Sample],
        summaries: Sequence[SampleSummary],
        version: int,
        siblings: Sequence[SampleSummary] = (),
    ) -> dict[str, float]:
        """One training phase on the samples of all ranks. `version` is that of the actor's weights now: tokens that an
        older version made are off-policy. An optimizer step without a single sample to train leaves the weights as they
        are."""
        options = self.config.algorithm
        with self.clock.phase("batch"):
            minibatches = self.plan(summaries)
            held = {s.sample_id: s for s in samples}
            outgoing: list[list[Sample]] = [[] for _ in range(self.runtime.world_size)]
            for rank, dp_rank in enumerate(self.runtime.dp_rank_of):
                for i in (i for mini in minibatches for batch in mini.plan[dp_rank] for i in batch):
                    if summaries[i].holder == self.runtime.rank:
                        outgoing[rank].append(held[summaries[i].sample_id])
            received = exchange(outgoing, self.runtime)
            if self.config.moe.moe_router_replay == "rollout":
                exchange_routing(outgoing, received, self.runtime)
            batches = [self._collate(mini, summaries, received, version) for mini in minibatches]
        several = options.ppo_epochs * options.num_minibatches > 1
        if options.old_log_probs == "actor" and (several or options.kl_coef > 0):
            with self.clock.phase("old_log_probs"):
                batches = [self._with_old_log_probs(batch) for batch in batches]
        if self.reference is not None:
            with self.clock.phase("ref_log_probs"), self.reference.active():
                batches = [self._with_ref_log_probs(batch) for batch in batches]
        if self.critic is not None:
            with self.clock.phase("values"):
                batches = [_with_field(batch, "values", self.critic.values(_freely_routed(batch))) for batch in batches]
        with self.clock.phase("advantages"):
            step, metrics = step_rewards(self.config, summaries, siblings)
            rows = [mini.plan[self.runtime.dp_rank] for mini in minibatches]
            batches, numbers = assign_credit(
                options, step, batches, rows, self.runtime.reduce_sum, counts=self._speaks_for_its_batches
            )
            metrics |= numbers
        passes = [(m, b) for _ in range(options.ppo_epochs) for m, b in zip(minibatches, batches) if m.members]
        if self.critic is not None:
            with self.clock.phase("train_critic"):
                metrics |= summarise_updates([self._update_critic(mini, batch) for mini, batch in passes])
            if version < self.config.critic.critic_warmup_steps:
                return metrics
        with self.clock.phase("train"):
            updates = [self._update(mini, batch) for mini, batch in passes]
        # The comparison with the engine is of the weights that it had: those of the first update, or of all updates of
        # the first epoch if their log-probabilities were taken before.
        fresh = options.num_minibatches if options.old_log_probs == "actor" else 1
        metrics["actor/updates"] = float(len(updates))
        metrics["actor/trained_samples"] = float(sum(len(mini.members) for mini in minibatches))
        return metrics | summarise_updates(updates, fresh)

    def _update(self, mini: MiniBatch, batches: list[MicroBatch]) -> dict[str, float]:
        """One optimizer step, and its numbers."""
        objective = Objective(self.config.algorithm, mini.total_tokens)
        update = finish_metrics(self.actor.train_step(batches, objective, self.config.rollout.temperature))
        for name, value in objective.maxima.items():
            if name != "rollout_corr/rollout_is_max" or is_corrected(self.config.algorithm):
                update[name] = self.runtime.reduce_max(value)
        return update

    def _update_critic(self, mini: MiniBatch, batches: list[MicroBatch]) -> dict[str, float]:
        """One optimizer step of the critic, and its numbers."""
        assert self.critic is not None
        objective = ValueObjective(self.config.critic.value_clip, mini.total_tokens)
        return finish_value_metrics(self.critic.train_step(_freely_routed(batches), objective))

    @property
    def _speaks_for_its_batches(self) -> bool:
        """One of the ranks that hold the same micro-batches."""
        r = self.runtime
        return r.tp_rank == 0 and r.cp_rank == 0 and r.pp_rank == 0

    def plan(self, summaries: Sequence[SampleSummary]) -> list[MiniBatch]:
        """Divide the samples into optimizer steps (whole groups together) and those into micro-batches."""
        options = self.config.algorithm
        groups = group_numbers(summaries)
        present = sorted(set(groups.tolist()))
        minibatches = []
        for part in np.array_split(np.random.default_rng(0).permutation(present), options.num_minibatches):
            chosen = set(part.tolist())
            members = [
                i
                for i, group in enumerate(groups.tolist())
                if group in chosen and not (options.overlong_filtering and summaries[i].truncated)
            ]
            responses = np.array([summaries[i].response_len for i in members])
            weights = aggregation_weights(options.loss_agg_mode, responses, self.config.rollout.max_response_len)
            plan = plan_micro_batches(
                [summaries[i].prompt_len + summaries[i].response_len for i in members],
                self.runtime.dp_size,
                options.max_tokens_per_microbatch,
                self.arch.hidden_size,
            )
            minibatches.append(
                MiniBatch(
                    members,
                    [[[members[i] for i in batch] for batch in rank] for rank in plan],
                    dict(zip(members, weights.tolist())),
                    int(responses.sum()),
                )
            )
        return minibatches

    def _collate(
        self,
        mini: MiniBatch,
        summaries: Sequence[SampleSummary],
        received: dict[SampleId, Sample],
        version: int,
    ) -> list[MicroBatch]:
        """This rank's micro-batches of one optimizer step, on the device."""
        names = ["weights", "rollout_log_probs"]
        if self.config.algorithm.old_log_probs == "engine":
            names.append("old_log_probs")
        if any(summaries[i].oldest_version < version for i in mini.members):
            names.append("stale")
        batches = []
        for indices in mini.plan[self.runtime.dp_rank]:
            rows = []
            for i in indices:
                sample = received[summaries[i].sample_id]
                engine = np.array(sample.log_probs, np.float32)
                ones = np.ones(len(engine), np.float32)
                fields = {
                    "weights": ones * mini.weights[i],
                    "rollout_log_probs": engine,
                    "old_log_probs": engine,
                    "stale": (np.array(sample.versions) < version).astype(np.float32),
                }
                tokens = np.array([*sample.prompt_ids, *sample.response_ids], np.int64)
                rows.append(TrainSample(tokens, len(sample.prompt_ids), ones, fields, self._routing_of(sample)))
            batches.append(collate(rows, names, self.runtime.device))
        return batches

    def _routing_of(self, sample: Sample) -> npt.NDArray[np.int16] | None:
        """The engine's experts for this sample's tokens, if they are to be replayed."""
        if sample.routing is None:
            return None
        layers = [layer for layer in range(self.arch.num_layers) if self.arch.layer_is_moe(layer)]
        try:
            return replayable(sample.routing, layers, self.arch.num_experts)
        except ValueError as error:
            raise TrainingError(f"the engine's routing of sample {sample.sample_id}: {error}") from None

    def _with_old_log_probs(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Of the weights as they are. Under --moe-router-replay actor the updates get the experts of this pass."""
        done = _with_field(batches, "old_log_probs", self.actor.log_probs(batches, self.config.rollout.temperature))
        if self.config.moe.moe_router_replay == "actor":
            done = [replace(batch, routing=routing) for batch, routing in zip(done, self.actor.recorded)]
        return done

    def _with_ref_log_probs(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Of the reference weights, inside `ReferenceWeights.active`; its tokens go where its own routers send them."""
        found = self.actor.log_probs(_freely_routed(batches), self.config.rollout.temperature)
        return _with_field(batches, "ref_log_probs", found)


def _freely_routed(batches: list[MicroBatch]) -> list[MicroBatch]:
    return [replace(batch, routing=None) for batch in batches]


def _with_field(batches: list[MicroBatch], name: str, values: Sequence[Tensor]) -> list[MicroBatch]:
    return [spread_fields(batch, {name: part}) for batch, part in zip(batches, values)]


def group_numbers(summaries: Sequence[SampleSummary]) -> npt.NDArray[np.int64]:
    """The group of each sample: the same prompt may be in two steps of one call, and those are two groups."""
    numbers: dict[tuple[int, int], int] = {}
    keys = [(s.sample_id.step, s.sample_id.prompt_id) for s in summaries]
    for key in sorted(set(keys)):
        numbers[key] = len(numbers)
    return np.array([numbers[key] for key in keys], np.int64)


def step_rewards(
    config: Config, summaries: Sequence[SampleSummary], siblings: Sequence[SampleSummary]
) -> tuple[StepRewards, dict[str, float]]:
    """What is compared: rewards with the penalty of `--overlong-buffer-len`, groups and lengths, siblings last."""
    options = config.algorithm
    everyone = [*summaries, *siblings]
    rewards = np.array([s.reward for s in everyone], np.float64)
    lengths = np.array([s.response_len for s in everyone], np.int64)
    metrics: dict[str, float] = {}
    if options.overlong_buffer_len:
        penalties = overlong_penalty(
            lengths, config.rollout.max_response_len, options.overlong_buffer_len, options.overlong_penalty_factor
        )
        rewards = rewards + penalties
        metrics["reward/overlong_penalty"] = float(penalties.mean()) if len(penalties) else 0.0
    return StepRewards(rewards, group_numbers(everyone), lengths, [str(s.sample_id) for s in everyone]), metrics


def summarise_updates(updates: Sequence[dict[str, float]], fresh: int = 1) -> dict[str, float]:
    """Numbers of a training phase from those of its optimizer steps: means, except that the comparison with the engine
    is taken from the first `fresh` steps (later ones run on weights that the engine never had), and of maxima the
    largest."""
    merged: dict[str, float] = {}
    for name in updates[0] if updates else ():
        part = updates[:fresh] if name in (*MISMATCH, *MAXIMA) else updates
        values = [u[name] for u in part if name in u]
        merged[name] = max(values) if name in MAXIMA else sum(values) / len(values)
    return merged
