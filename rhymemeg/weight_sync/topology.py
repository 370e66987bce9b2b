"""Which rank holds which part of the actor, and which rank of which engine needs what. Pure Python.

`ActorLayout` is a list of the coordinates of every rank. A run collects them from the ranks (`actor_side.py`), so that
they hold whatever order Megatron put the ranks in; `ActorLayout.planned` takes them from the description of a layout
that does not run.

`EngineLayout`: engines of `tp` consecutive ranks each. Its ranks take a slice of every tensor; with expert
parallelism they take whole experts instead of a slice of each. `whole=True` asks for complete tensors on every rank,
which is what trainers that gather do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rhymemeg.parallel.layout_checks import Layout


class Coordinates(NamedTuple):
    """One rank's place in the actor. `layers`: the global layers of its pipeline stage, all virtual stages together."""

    tp: int
    pp: int
    ep: int
    etp: int
    layers: tuple[int, ...]


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ActorLayout:
    """Coordinates of every rank, in rank order, and the sizes."""

    ranks: tuple[Coordinates, ...]
    tp: int
    pp: int
    ep: int
    etp: int
    padded_vocab: int

    @classmethod
    def planned(cls, layout: Layout, padded_vocab: int) -> ActorLayout:
        """The layout that a run with these options would have (`rhymemeg.parallel.layout_checks.describe_layout`)."""
        ranks = tuple(
            Coordinates(p.tp, p.pp, p.ep, p.etp, tuple(sorted(layer for stage in p.layers for layer in stage)))
            for p in layout.places()
        )
        return cls(ranks, layout.tp, layout.pp, layout.ep, layout.etp, padded_vocab)

    @property
    def world(self) -> int:
        return len(self.ranks)

    @cached_property
    def _dense(self) -> dict[tuple[int, int], Ranks]:
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, c in enumerate(self.ranks):
            groups[c.pp, c.tp].append(rank)
        return {key: tuple(ranks) for key, ranks in groups.items()}

    @cached_property
    def _expert(self) -> dict[tuple[int, int, int], Ranks]:
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for rank, c in enumerate(self.ranks):
            groups[c.pp, c.ep, c.etp].append(rank)
        return {key: tuple(ranks) for key, ranks in groups.items()}

    @cached_property
    def stage_of_layer(self) -> dict[int, int]:
        """Global layer -> pipeline stage."""
        return {layer: c.pp for c in self.ranks for layer in c.layers}

    def dense_holders(self, pp: int, tp: int) -> Ranks:
        """Data- and context-parallel replicas of TP shard `tp` on stage `pp`."""
        return self._dense[pp, tp]

    def expert_holders(self, pp: int, ep: int, etp: int) -> Ranks:
        """Replicas of the experts of group `ep`, ETP shard `etp`, on stage `pp`."""
        return self._expert[pp, ep, etp]


@dataclass(frozen=True)
class EngineLayout:
    """`world // tp` engines; rank r is rank `r % tp` of engine `r // tp`."""

    world: int
    tp: int = 1
    expert_parallel: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if self.world % self.tp:
            raise ValueError(f"world size {self.world} is not divisible by the engine's tp={self.tp}")

    def members(self, engine_rank: int) -> range:
        """The ranks that are rank `engine_rank` of their engine."""
        return range(engine_rank, self.world, self.tp)

    def expert_owner(self, expert: int, num_experts: int) -> int:
        """Engine rank that holds this expert under expert parallelism: runs of equal length, longer ones first."""
        base, longer = divmod(num_experts, self.tp)
        if expert < longer * (base + 1):
            return expert // (base + 1)
        return longer + (expert - longer * (base + 1)) // base
