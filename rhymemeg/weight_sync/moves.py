"""What a plan of a weight update is made of, and what one rank reads off it. Pure Python; `planner.py` makes plans.

A plan lists no single moves: a large one has a hundred million. It holds *atoms* (boxes of tensors) that belong to
*classes* (who holds them, who needs them, who serves whom), from which moves, traffic and the program of a rank follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import Box, Shape, numel, whole
from rhymemeg.weight_sync.layouts import Parameter
from rhymemeg.weight_sync.rules import Part
from rhymemeg.weight_sync.topology import EngineLayout, Ranks


class Tensor(NamedTuple):
    """A Hugging Face tensor: name, shape, bytes an element, and the Megatron parameter it belongs to."""

    name: str
    shape: Shape
    itemsize: int
    parameter: Parameter
    part: Part


class Need(NamedTuple):
    """A box that a group of ranks needs. `lanes`: for sizing buckets; each rank of a target belongs to one lane."""

    box: Box
    ranks: Ranks
    lanes: tuple[int, ...]


class Target(Protocol):
    """Who needs what. Boxes of one tensor must be disjoint or equal; equal ones are listed once."""

    lanes: int

    def needs(self, tensor: Tensor) -> tuple[Need, ...]: ...


class EngineTarget:
    """The slices that the ranks of the engines need."""

    def __init__(self, engines: EngineLayout, num_experts: int = 0) -> None:
        self.engines, self.num_experts, self.lanes = engines, num_experts, engines.tp
        self._members = [tuple(engines.members(t)) for t in range(engines.tp)]
        self._everyone = tuple(range(engines.world))
        self._groups: dict[tuple[int, ...], Ranks] = {(t,): self._members[t] for t in range(engines.tp)}
        self._known: dict[tuple[int, str], tuple[Need, ...]] = {}

    def needs(self, tensor: Tensor) -> tuple[Need, ...]:
        e, expert = self.engines, tensor.parameter.expert
        if e.whole:
            return (Need(whole(tensor.shape), self._everyone, tuple(range(e.tp))),)
        if expert is not None and e.expert_parallel:
            owner = e.expert_owner(expert, self.num_experts)
            return (Need(whole(tensor.shape), self._members[owner], (owner,)),)
        # The answer depends on the rule, not on layer and expert.
        key = (id(tensor.parameter.rule), tensor.part.name)
        if key not in self._known:
            lanes: dict[Box, list[int]] = defaultdict(list)
            for t in range(e.tp):
                try:
                    lanes[tensor.part.split(tensor.name, tensor.shape, t, e.tp)].append(t)
                except ValueError as error:
                    raise WeightSyncError(f"engine of tp={e.tp}: {error}") from None
            self._known[key] = tuple(
                Need(box, self._ranks(tuple(ts)), tuple(ts)) for box, ts in lanes.items() if numel(box)
            )
        return self._known[key]

    def _ranks(self, lanes: tuple[int, ...]) -> Ranks:
        """The ranks of these lanes; always the same object, since the planner compares groups by identity."""
        if lanes not in self._groups:
            self._groups[lanes] = tuple(sorted(r for t in lanes for r in self._members[t]))
        return self._groups[lanes]


class Atom(NamedTuple):
    """One box of one tensor, moved as one; `part` of the class decides the source."""

    tensor: int
    box: Box
    group: int
    part: int


@dataclass
class Class:
    """Atoms held by the same ranks and needed by the same ranks. `sources[part][i]` serves `needers[i]`."""

    holders: Ranks
    needers: Ranks
    part_bytes: list[int] = field(default_factory=list)
    sources: list[list[int]] = field(default_factory=list)


class Move(NamedTuple):
    """`box` of tensor number `tensor` goes from rank `source` to rank `target`; a local copy if they are the same."""

    source: int
    target: int
    tensor: int
    box: Box


Items = list[tuple[int, Box]]
"""(tensor number, box) in the plan's order, so that both ends of a message know its content without a header."""


@dataclass
class Hop:
    """Messages of one rank: other rank -> content."""

    receive: dict[int, Items] = field(default_factory=dict)
    send: dict[int, Items] = field(default_factory=dict)


@dataclass
class BucketProgram:
    """What one rank does for the tensors of one bucket: copy `local`; receive and send of the first hop (from holders);
    then, with what has arrived, those of the second (from relays)."""

    tensors: range
    needed: dict[int, Box] = field(default_factory=dict)
    local: Items = field(default_factory=list)
    hops: tuple[Hop, Hop] = field(default_factory=lambda: (Hop(), Hop()))


@dataclass
class Traffic:
    """Bytes by rank: received and sent on the wire, within the node and to other nodes, and copied locally."""

    received_near: list[int]
    received_far: list[int]
    sent_near: list[int]
    sent_far: list[int]
    local: list[int]

    @property
    def received(self) -> list[int]:
        return [near + far for near, far in zip(self.received_near, self.received_far)]

    @property
    def sent(self) -> list[int]:
        return [near + far for near, far in zip(self.sent_near, self.sent_far)]


@dataclass
class Plan:
    tensors: list[Tensor]
    atoms: list[Atom]
    classes: list[Class]
    buckets: list[range]
    world: int
    ranks_per_node: int
    target: Target

    def moves(self) -> Iterator[Move]:
        """Every move, local ones included, those of the first hop before those of the second. For small plans."""
        for hop in (0, 1):
            for atom in self.atoms:
                group = self.classes[atom.group]
                for target, source in zip(group.needers, group.sources[atom.part]):
                    if hop == (source not in group.holders):
                        yield Move(source, target, atom.tensor, atom.box)

    def traffic(self) -> Traffic:
        n, node = self.world, self.ranks_per_node
        t = Traffic([0] * n, [0] * n, [0] * n, [0] * n, [0] * n)
        for group in self.classes:
            for size, sources in zip(group.part_bytes, group.sources):
                for target, source in zip(group.needers, sources):
                    if target == source:
                        t.local[target] += size
                    elif target // node == source // node:
                        t.received_near[target] += size
                        t.sent_near[source] += size
                    else:
                        t.received_far[target] += size
                        t.sent_far[source] += size
        return t

    def least_wire_bytes(self) -> int:
        """What the ranks need and do not hold, together: no plan for these layouts can move less."""
        return sum(
            sum(group.part_bytes) * len(members(group.needers) - members(group.holders)) for group in self.classes
        )

    def num_moves(self) -> int:
        """Number of moves, local ones included."""
        return sum(len(self.classes[atom.group].needers) for atom in self.atoms)

    def program(self, rank: int) -> list[BucketProgram]:
        """The part of one rank, bucket by bucket."""
        # For each class and part in which this rank plays a role: where it gets it from, and whom it serves.
        position: dict[int, int | None] = {}
        role: list[tuple[bool, list[tuple[int | None, int, list[int]]]]] = []
        for group in self.classes:
            key = id(group.needers)
            if key not in position:
                position[key] = group.needers.index(rank) if rank in group.needers else None
            at, holders = position[key], members(group.holders)
            takes_part = at is not None or rank in holders
            roles: list[tuple[int | None, int, list[int]]] = []
            for sources in group.sources if takes_part else [[]] * len(group.sources):
                source = None if at is None else sources[at]
                targets = [t for t, s in zip(group.needers, sources) if s == rank and t != rank]
                roles.append((source, 0 if source in holders else 1, targets))
            role.append((rank not in holders, roles))
        programs = [BucketProgram(tensors) for tensors in self.buckets]
        current = iter(programs)
        program = next(current, None)
        for atom in self.atoms:
            while program is not None and atom.tensor >= program.tensors.stop:
                program = next(current, None)
            assert program is not None
            relays, roles = role[atom.group]
            source, hop, targets = roles[atom.part]
            item = (atom.tensor, atom.box)
            if source == rank:
                program.local.append(item)
            elif source is not None:
                program.hops[hop].receive.setdefault(source, []).append(item)
            for target in targets:
                program.hops[relays].send.setdefault(target, []).append(item)
        for program in programs:
            for i in program.tensors:
                for need in self.target.needs(self.tensors[i]):
                    if rank in members(need.ranks):
                        program.needed[i] = need.box
        return programs


_SETS: dict[int, tuple[Ranks, frozenset[int]]] = {}


def members(ranks: Ranks) -> frozenset[int]:
    """The ranks as a set; remembered, since the same tuple is asked for very often."""
    known = _SETS.get(id(ranks))
    if known is None or known[0] is not ranks:
        if len(_SETS) > 4096:
            _SETS.clear()
        known = _SETS[id(ranks)] = (ranks, frozenset(ranks))
    return known[1]
