"""One rollout phase with a plan made beforehand: who generates what, the loop over engine steps, and gathering.

    queues = assign_samples(samples, engine.num_engines)              # pure, the same on every rank
    done = run_samples(engine, queues[engine.engine_index], sampling, run_seed, timeout=1800)
    everything = gather_samples(done, runtime)                        # where all ranks want all samples

Nothing here communicates between engines while they run; `between_steps` is the place for a scheduler that does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rhymemeg.errors import RolloutError
from rhymemeg.rollout.engine import RolloutEngine
from rhymemeg.rollout.samples import Sample, sample_seed
from rhymemeg.rollout.spec import SamplingOptions

# Progress is reported at most this often, in seconds.
PROGRESS_INTERVAL = 0.2


@dataclass
class Progress:
    """The state of this rank's engine: tokens emitted so far, samples finished, requests running and waiting."""

    tokens: int
    finished: int
    running: int
    waiting: int


class Gatherer(Protocol):
    """The part of `parallel.runtime.Runtime` that gathering needs."""

    def all_gather_object(self, value: Any) -> list[Any]: ...


def assign_samples(
    samples: Sequence[Sample], num_engines: int, work: Mapping[int, float] | None = None
) -> list[list[Sample]]:
    """Divide samples among engines, whole groups together so that a group's prompt is computed once. Groups are dealt
    in order of falling work, each to the engine with the least so far (longest processing time first: at most 4/3 of
    the best makespan). `work`: estimated tokens of a prompt's responses, by prompt id; without it a token of prompt
    counts as one and all responses as equal. Within an engine the order is that of dealing, so the longest start
    first."""
    groups: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: s.sample_id):
        groups.setdefault(sample.sample_id.prompt_id, []).append(sample)
    known = list(work.values()) if work else []
    usual = sum(known) / len(known) if known else 0.0

    def cost(prompt_id: int) -> float:
        members = groups[prompt_id]
        done = sum(len(s.response_ids) for s in members)
        return len(members[0].prompt_ids) + len(members) * (work or {}).get(prompt_id, usual) - done

    queues: list[list[Sample]] = [[] for _ in range(num_engines)]
    load = [0.0] * num_engines
    for prompt_id in sorted(groups, key=lambda p: (-cost(p), p)):
        least = min(range(num_engines), key=lambda e: (load[e], e))
        queues[least] += groups[prompt_id]
        load[least] += cost(prompt_id)
    return queues


def run_samples(
    engine: RolloutEngine,
    samples: Iterable[Sample],
    sampling: SamplingOptions,
    run_seed: int,
    *,
    timeout: float,
    progress: Callable[[Progress], None] | None = None,
    between_steps: Callable[[RolloutEngine], bool] | None = None,
) -> list[Sample]:
    """Run `samples` to completion on this rank's engine; all ranks of the engine call it alike. Seeds derive from the
    run seed and the sample, so where a sample runs makes no difference.

    between_steps(engine) is called before each step and may add, pause and abort, identically on all ranks of the
    engine; while it returns True the loop goes on although the engine is idle.
    progress is called on the leader, a few times a second.
    timeout in seconds; when it has passed, RolloutError names the engine and the samples that are not complete.

    Returns the finished samples in order of their ids on the leader, and nothing on the engine's other ranks."""
    for sample in samples:
        engine.add(sample, sampling, sample_seed(run_seed, sample.sample_id, len(sample.response_ids)))
    finished: list[Sample] = []
    tokens = 0
    deadline = time.monotonic() + timeout
    report_at = 0.0
    while True:
        more = between_steps(engine) if between_steps else False
        if not engine.has_unfinished() and not more:
            break
        output = engine.step()
        finished += output.finished
        tokens += output.tokens
        now = time.monotonic()
        if now > deadline:
            raise RolloutError(unfinished_message(engine, timeout))
        if progress and engine.is_leader and (now >= report_at or not engine.has_unfinished()):
            report_at = now + PROGRESS_INTERVAL
            progress(Progress(tokens, len(finished), output.running, output.waiting))
    return sorted(finished, key=lambda s: s.sample_id) if engine.is_leader else []


def unfinished_message(engine: RolloutEngine, timeout: float) -> str:
    """What an engine says that is out of time."""
    left = engine.unfinished
    named = ", ".join(f"{s.sample_id} ({len(s.response_ids)} tokens)" for s in left[:8])
    more = f" and {len(left) - 8} more" if len(left) > 8 else ""
    return (
        f"engine {engine.engine_index} (ranks {engine.engine_ranks}) did not finish in {timeout:g} s "
        f"(--rollout-timeout-minutes): {len(left)} samples left: {named}{more}"
    )


def gather_samples(samples: Sequence[Sample], ranks: Gatherer) -> list[Sample]:
    """The samples of all ranks, on every rank, in order of their ids. For small numbers of samples (evaluation, tests):
    training moves each sample only to where it is trained."""
    return sorted((s for part in ranks.all_gather_object(list(samples)) for s in part), key=lambda s: s.sample_id)
