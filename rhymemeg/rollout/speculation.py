"""HistoSpec in a run: the history of each engine, and the drafter that uses it.

    speculation = Speculation(options, arch, engine, runtime, tokenizer_name)
    speculation.begin(step, prompts, engine_of)      before a window: fetch and index the history of this engine's
    prompts ... the engine drafts by itself while it runs ...
    metrics = speculation.end(samples, prompts)      after the rewards: record what was generated, forget the index

The history of a prompt lives on the leader rank of the engine that sampled it last. When another engine is to sample
it, it moves there, as bytes, before the window; the other ranks of a tensor-parallel engine get a copy for the window,
since all of them must draft alike. Who holds what follows from the plans alone, which are the same on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.config import HistoSpecOptions
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.metrics import Counters, Watchdog
from rhymemeg.histospec.proposer import WORKER_EXTENSION, attach, speculative_config
from rhymemeg.histospec.warm_start import KnownPrompt, warm_start
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rl.exchange import exchange_bytes
from rhymemeg.rollout.engine import RolloutEngine
from rhymemeg.rollout.samples import Prompt, Sample

GIB = 1 << 30


def engine_arguments(options: HistoSpecOptions, max_num_seqs: int) -> dict[str, Any]:
    """What `RolloutEngine.start` needs so that drafts can be attached; nothing where HistoSpec is off."""
    if not options.histospec:
        return {}
    speculative = speculative_config(options.histospec_max_draft, max_num_seqs)
    return {"speculative": speculative, "worker_extension": WORKER_EXTENSION}


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
        )
        self.watchdog = Watchdog()
        self._holder: dict[int, int] = {}  # prompt -> the rank that has its history
        attach(engine.vllm.model_runner, self.drafter)

    def warm_start(self, path: str, prompts: Sequence[Prompt], encode: Any) -> int:
        """Begin with the responses of a file. Every engine leader reads it; prompt p starts on engine p mod engines.
        Returns the number of prompts that have history."""
        ranks = self.engine.spec.tensor_parallel_size
        place = {p.prompt_id: (p.prompt_id % self.engine.num_engines) * ranks for p in prompts}
        mine = [
            KnownPrompt(p.prompt_id, p.text, p.token_ids) for p in prompts if place[p.prompt_id] == self.runtime.rank
        ]
        warm_start(self.history, path, mine, encode)
        for held in self.runtime.all_gather_object(list(self.history)):
            self._holder.update({prompt_id: place[prompt_id] for prompt_id in held})
        return len(self._holder)

    def begin(self, prompts: Sequence[Prompt], engine_of: Mapping[int, int]) -> None:
        """Bring the history of `prompts` to the ranks of the engines that will sample them, and index it."""
        size, rank = self.engine.spec.tensor_parallel_size, self.runtime.rank
        outgoing = [b""] * self.runtime.world_size
        moved: set[int] = set()
        for target in range(self.runtime.world_size):
            wanted = [
                p.prompt_id
                for p in prompts
                if engine_of[p.prompt_id] == target // size and self._holder.get(p.prompt_id) == rank and target != rank
            ]
            if wanted:
                outgoing[target] = self.history.export(wanted)
                moved.update(p for p in wanted if engine_of[p] != self.engine.engine_index)
        for source, data in enumerate(exchange_bytes(outgoing, self.runtime)):
            if data:
                self.history.merge(data, f"history moved from rank {source}")
        for prompt_id in moved:
            self.history.discard(prompt_id)
        for p in prompts:
            if p.prompt_id in self._holder:
                self._holder[p.prompt_id] = engine_of[p.prompt_id] * size
        here = {p.prompt_id: p.token_ids for p in prompts if engine_of[p.prompt_id] == self.engine.engine_index}
        self.drafter.load(here)

    def forget(self) -> None:
        """After a window whose samples are not to become history."""
        self.drafter.release()
        self.drafter.counters = Counters()

    def end(
        self, step: int, samples: Sequence[Sample], prompts: Sequence[Prompt], engine_of: Mapping[int, int]
    ) -> dict[str, float]:
        """Record this engine's samples (with rewards) for the next epoch. Returns `histospec/*` of all engines."""
        self.drafter.release()
        if self.engine.is_leader:
            groups: dict[int, list[Sample]] = {}
            for sample in samples:
                groups.setdefault(sample.sample_id.prompt_id, []).append(sample)
            for prompt_id, group in groups.items():
                self.history.record(
                    prompt_id,
                    group[0].prompt_ids,
                    [s.response_ids for s in group],
                    [s.reward or 0.0 for s in group],
                    step=step,
                    versions=[max(s.versions, default=-1) for s in group],
                )
        else:
            for prompt_id in list(self.history):
                self.history.discard(prompt_id)
        size = self.engine.spec.tensor_parallel_size
        self._holder.update({p.prompt_id: engine_of[p.prompt_id] * size for p in prompts})
        counters, self.drafter.counters = self.drafter.counters, Counters()
        parts = self.runtime.all_gather_object(
            (counters, self.history.num_bytes, self.history.num_tokens) if self.engine.is_leader else None
        )
        leaders = [part for part in parts if part is not None]
        total = sum((part[0] for part in leaders), Counters())
        held_bytes, held_tokens = sum(part[1] for part in leaders), sum(part[2] for part in leaders)
        warning = self.watchdog.update(self.engine.version, total.drafted, total.accepted)
        return total.metrics() | {
            "histospec/history_bytes": float(held_bytes),
            "histospec/history_bytes_per_token": held_bytes / held_tokens if held_tokens else 0.0,
            "histospec/watchdog": float(warning is not None),
        }
