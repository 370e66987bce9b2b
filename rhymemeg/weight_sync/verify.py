"""Proof, at each update, that what the engines hold is what the actor holds.

A `Verifier` belongs to one plan. `begin(version, held)` chooses the tensors of this update (all, a rotating subset, or
none) and computes what their checksums should be from the actor's shards: each slice is counted by its lowest-ranked
holder, and the sums go to every rank. They are kept for each lane (rank in an engine) apart, so every rank checks its
own slices; nothing but the sums travels.

`Check.observing` reads the engine's own parameters as its loader fills them (`engine_side.py`). `Check.finish` compares
and returns the error, if any, that names the tensor: one whose values differ, or one that the engine did not load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import Box, contains, shape_of, shift, slices, whole
from rhymemeg.weight_sync.checksum import checksum, from_halves, halves
from rhymemeg.weight_sync.engine_side import engine_slots, reading
from rhymemeg.weight_sync.moves import Atom, Plan
from rhymemeg.weight_sync.transfer import Delivery, Held

if TYPE_CHECKING:
    from rhymemeg.parallel.runtime import Runtime

ROTATION = 10
"""Updates within which `sampled` has checked every tensor."""


class Verifier:
    def __init__(self, plan: Plan, runtime: Runtime, mode: Literal["off", "sampled", "full"]) -> None:
        self.plan, self.runtime, self.mode = plan, runtime, mode
        # The slices that this rank counts for the actor, by tensor, each with the lanes that need it.
        self.counted: dict[int, list[tuple[Box, tuple[int, ...]]]] = {}
        for atom in plan.atoms:
            if plan.classes[atom.group].holders[0] == runtime.rank:
                self.counted.setdefault(atom.tensor, []).append((atom.box, self._lanes(atom)))
        # What this rank's engine holds: tensor number -> box.
        self.needed = {
            number: need.box
            for number, tensor in enumerate(plan.tensors)
            for need in plan.target.needs(tensor)
            if runtime.rank % plan.target.lanes in need.lanes
        }
        self.slots = engine_slots([(plan.tensors[number], box) for number, box in self.needed.items()])

    def _lanes(self, atom: Atom) -> tuple[int, ...]:
        needs = self.plan.target.needs(self.plan.tensors[atom.tensor])
        return next(need.lanes for need in needs if contains(need.box, atom.box))

    def chosen(self, version: int) -> list[int]:
        """Numbers of the tensors to check with this version."""
        if self.mode == "off":
            return []
        count = len(self.plan.tensors)
        return list(range(count)) if self.mode == "full" else list(range(version % ROTATION, count, ROTATION))

    def begin(self, version: int, held: Held) -> Check:
        """Collective. `held` is what this rank's shards hold now."""
        chosen = self.chosen(version)
        lanes = self.plan.target.lanes
        device = self.runtime.device
        expected = torch.zeros(len(chosen), lanes, dtype=torch.int64, device=device)
        for row, number in enumerate(chosen):
            tensor = self.plan.tensors[number]
            for box, needed_by in self.counted.get(number, ()):
                part = checksum(_read(held[tensor.name], box), box, tensor.shape)
                for lane in needed_by:
                    expected[row, lane] += part
        sums = halves(expected).cpu()
        if chosen:
            dist.all_reduce(sums, group=self.runtime.control_group)
        return Check(self, version, chosen, from_halves(sums))


def _read(views: list[tuple[Box, torch.Tensor]], box: Box) -> torch.Tensor:
    for outer, view in views:
        if contains(outer, box):
            return view[slices(shift(box, outer, whole(shape_of(outer))))]
    raise AssertionError(f"the plan says that this rank holds {box}")


class Check:
    """One update's verification."""

    def __init__(self, verifier: Verifier, version: int, chosen: list[int], expected: list[int]) -> None:
        self.version = version
        plan = verifier.plan
        lanes = plan.target.lanes
        lane = verifier.runtime.rank % lanes
        needed = verifier.needed
        # Tensors of which this rank's engine holds nothing (experts of other ranks) have nothing to compare.
        self.expected = {
            plan.tensors[number].name: expected[row * lanes + lane]
            for row, number in enumerate(chosen)
            if number in needed
        }
        self.slots = {
            parameter: kept
            for parameter, slots in verifier.slots.items()
            if (kept := [slot for slot in slots if slot.name in self.expected])
        }
        self.found: dict[str, torch.Tensor] = {}
        self.count = len(chosen)

    def observing(self, model: torch.nn.Module | None) -> AbstractContextManager[None]:
        """Around the engine's load: read what it puts into `model` (None: it has none that can be read)."""
        return nullcontext() if model is None else reading(model, self.slots, self.found)

    def watch(self, deliveries: Iterator[Delivery]) -> Iterator[Delivery]:
        """For an engine that cannot be read: check what it is given instead."""
        for delivery in deliveries:
            tensor, box, data = delivery
            if tensor.name in self.expected and box is not None and data is not None:
                self.found[tensor.name] = checksum(data, box, tensor.shape)
            yield delivery

    def finish(self) -> WeightSyncError | None:
        """The first tensor whose checksum is not the actor's, as an error."""
        missing = [name for name in self.expected if name not in self.found]
        if missing:
            return WeightSyncError(f"version {self.version}: the engine did not load {missing[0]!r}")
        found = from_halves(halves(torch.stack(list(self.found.values())))) if self.found else []
        wrong = [name for name, value in zip(self.found, found) if value != self.expected[name]]
        if not wrong:
            return None
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        return WeightSyncError(f"version {self.version}: {wrong[0]!r} in the engine differs from the actor's{more}")
