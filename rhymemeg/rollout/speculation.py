"""HistoSpec in a run: the history of all prompts, and the drafter of each engine that uses it.

    speculation = Speculation(options, arch, engine, runtime, tokenizer_name)
    speculation.begin(prompts, engines_of)       before a window: fetch and index the history of this engine's prompts
    ... the engine drafts by itself while it runs; `lend` and `borrow` where requests change engine meanwhile ...
    speculation.release()                        after it: forget the index and what was borrowed
    metrics = speculation.record(samples, ...)   after the rewards: keep what was generated

Each prompt has a *home*, the leader rank of one engine, which keeps its history from epoch to epoch. Engines that sample
the prompt get a copy for the window, all ranks of a tensor-parallel engine alike, since all of them must draft alike; what
they generate goes back to the home. So responses of one prompt can be sampled anywhere, and where is up to the plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.config import EngineOptions, HistoSpecOptions
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions, step_clock
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.metrics import Counters, Watchdog
from rhymemeg.histospec.proposer import WORKER_EXTENSION, attach, speculative_config
from rhymemeg.histospec.warm_start import KnownPrompt, warm_start
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rl.exchange import exchange_bytes
from rhymemeg.rollout.engine import RolloutEngine
from rhymemeg.rollout.samples import Prompt, Sample
from rhymemeg.rollout.wire import pack_samples, unpack_samples

GIB = 1 << 30


def engine_arguments(options: HistoSpecOptions, engine: EngineOptions) -> dict[str, Any]:
    """What `RolloutEngine.start` needs so that drafts can be attached, or for vLLM's own drafts; nothing without either."""
    if options.histospec:
        speculative = speculative_config(options.histospec_max_draft, engine.vllm_max_num_seqs)
        return {"speculative": speculative, "worker_extension": WORKER_EXTENSION}
    if engine.vllm_speculative_config:
        return {"speculative": json.loads(engine.vllm_speculative_config)}
    return {}


def tokenizer_digest(folder: str) -> str:
    """Names a tokenizer by its file, so that history of another one is refused."""
    file = Path(folder) / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else ""


class Speculation:
    """See the module. All methods are collective."""

    def __init__(
        self, options: HistoSpecOptions, arch: ModelArch, engine: RolloutEngine, runtime: Runtime, tokenizer: str
    ) -> None:
        self.engine, self.runtime = engine, runtime
        self.history = HistoryBuffer(
            arch.vocab_size, tokenizer=tokenizer, budget_bytes=int(options.histospec_memory_gib * GIB)
        )
        if options.histospec_profile:
            cost = CostModel.load(options.histospec_profile)
        else:
            cost = CostModel.built_in("cpu" if runtime.device_type == "cpu" else "gpu")
        self.drafter = Drafter(
            DrafterOptions(
                policy=options.histospec_policy,
                max_draft=options.histospec_max_draft,
                branch=options.histospec_branch,
                siblings=options.histospec_siblings,
            ),
            self.history,
            cost,
            clock=step_clock(runtime.device_type),
        )
        self.watchdog = Watchdog()
        self.warning: str | None = None
        """What the watchdog says of the last window."""
        self._prompt_ids: dict[int, tuple[int, ...]] = {}  # of the window's prompts, whatever engine they are on
        self._borrowed: set[int] = set()
        attach(engine.vllm.model_runner, self.drafter)

    def home(self, prompt_id: int) -> int:
        """The rank that keeps the history of a prompt."""
        return prompt_id % self.engine.num_engines * self.engine.spec.tensor_parallel_size

    def warm_start(self, path: str, prompts: Sequence[Prompt], encode: Any) -> int:
        """Begin with the responses of a file, which every engine leader reads. Returns the number of prompts that have
        history."""
        mine = [
            KnownPrompt(p.prompt_id, p.text, p.token_ids)
            for p in prompts
            if self.home(p.prompt_id) == self.runtime.rank
        ]
        warm_start(self.history, path, mine, encode)
        return sum(self.runtime.all_gather_object(len(self.history)))

    # -------------------------------------------------------------------------------------------------------- window

    def begin(self, prompts: Sequence[Prompt], engines_of: Mapping[int, Collection[int]]) -> None:
        """Bring the history of `prompts` to the ranks of the engines that will sample them, and index it there."""
        size, rank, mine = self.engine.spec.tensor_parallel_size, self.runtime.rank, self.engine.engine_index
        at_home = [p.prompt_id for p in prompts if self.home(p.prompt_id) == rank and p.prompt_id in self.history]
        outgoing = [b""] * self.runtime.world_size
        for target in range(self.runtime.world_size):
            wanted = [p for p in at_home if target // size in engines_of[p]]
            if wanted and target != rank:
                outgoing[target] = self.history.export(wanted)
        here = {p.prompt_id: p.token_ids for p in prompts if mine in engines_of[p.prompt_id]}
        for source, data in enumerate(exchange_bytes(outgoing, self.runtime)):
            if data:
                self.history.merge(data, f"history from rank {source}")
        self._borrowed = {p for p in here if self.home(p) != rank}
        self._prompt_ids = {p.prompt_id: p.token_ids for p in prompts}
        self.drafter.load(here)

    def lend(self, prompt_ids: Iterable[int]) -> bytes:
        """History of these prompts, as far as it is here, for an engine that takes over some of their requests."""
        return self.history.export(prompt_ids)

    def borrow(self, prompt_ids: Iterable[int], data: bytes) -> None:
        """Take in what another engine lent, in the middle of a window."""
        new = [p for p in prompt_ids if p not in self.drafter.prompts]
        if any(p not in self.history for p in new):
            self.history.merge(data, "borrowed history")
        self._borrowed |= {p for p in new if self.home(p) != self.runtime.rank}
        self.drafter.load({p: self._prompt_ids[p] for p in new})

    def release(self) -> None:
        """The window is over."""
        self.drafter.release()
        for prompt_id in self._borrowed:
            self.history.discard(prompt_id)
        self._borrowed, self._prompt_ids = set(), {}

    def forget(self) -> None:
        """Drop the counters of a window whose samples are not to become history."""
        self.drafter.counters = Counters()

    # ------------------------------------------------------------------------------------------------------- history

    def record(self, samples: Sequence[Sample], next_uses: Iterable[int] = ()) -> dict[str, float]:
        """Keep these samples of this rank, complete and rewarded, for the next epoch. `next_uses`: prompts in the order in
        which they will be sampled again; what comes last is dropped first where memory is short. Returns `histospec/*`
        of all engines."""
        outgoing: list[list[Sample]] = [[] for _ in range(self.runtime.world_size)]
        for sample in samples:
            outgoing[self.home(sample.sample_id.prompt_id)].append(sample)
        if self.history.budget_bytes and self.history.num_bytes > self.history.budget_bytes // 2:
            self.history.set_next_uses(p for p in next_uses if self.home(p) == self.runtime.rank)
        groups: dict[tuple[int, int], list[Sample]] = {}
        for data in exchange_bytes([pack_samples(part) for part in outgoing], self.runtime):
            for sample in unpack_samples(data):
                groups.setdefault((sample.sample_id.step, sample.sample_id.prompt_id), []).append(sample)
        for (step, prompt_id), group in sorted(groups.items()):
            group.sort(key=lambda s: s.sample_id)
            self.history.record(
                prompt_id,
                group[0].prompt_ids,
                [s.response_ids for s in group],
                [s.reward or 0.0 for s in group],
                step=step,
                versions=[max(s.versions, default=-1) for s in group],
            )
        return self._metrics()

    def _metrics(self) -> dict[str, float]:
        counters, self.drafter.counters = self.drafter.counters, Counters()
        parts = self.runtime.all_gather_object(
            (counters, self.history.num_bytes, self.history.num_tokens) if self.engine.is_leader else None
        )
        leaders = [part for part in parts if part is not None]
        total = sum((part[0] for part in leaders), Counters())
        held_bytes, held_tokens = sum(part[1] for part in leaders), sum(part[2] for part in leaders)
        self.warning = self.watchdog.update(self.engine.version, total.drafted, total.accepted)
        return total.metrics() | {
            "histospec/history_bytes": float(held_bytes),
            "histospec/history_bytes_per_token": held_bytes / held_tokens if held_tokens else 0.0,
            "histospec/watchdog": float(self.warning is not None),
        }

    def save(self) -> bytes:
        """The history that is at home here, for the checkpoint."""
        return self.history.export()

    def restore(self, pieces: Iterable[bytes]) -> None:
        """Inverse of `save`: the pieces of all ranks of the run that was saved; what is at home here is kept."""
        for data in pieces:
            self.history.merge(data, "history in the checkpoint")
            for prompt_id in [p for p in self.history if self.home(p) != self.runtime.rank]:
                self.history.discard(prompt_id)
