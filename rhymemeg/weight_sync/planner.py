"""Which rank sends which slice of which tensor to whom: the plan of a weight update. Pure Python, no process group.

In: the model's table (`layouts.py`), where the actor's shards are (`ActorLayout`), and who needs what (a `Target`: the
engines, or the writers of an export). Out: a `Plan`, made once and used for every update.

Method.
1. Cut each Hugging Face tensor into the common refinement of what the actor's shards hold and what the targets need.
   A cut is an *atom*: one box, held by a group of ranks (replicas), needed by a group of ranks. The cuts depend on the
   rule and the layout only, so they are computed once a rule and reused for every layer and expert.
2. Atoms with the same holders and the same needers form a *class*; there are few, however large the model is. Each
   needer gets a class from one holder: itself if it is one, else one on its node, else any, each time the one that has
   least to send so far. A class with more holders than needers is cut in parts first, so that all holders can serve.
   Classes are served largest first. Where a class has many more needers than holders (`relay_above`), holders send to
   some of the needers only, one a node first, and these *relays* pass it on: two hops, the square root of the fan-out
   in each, so that all ranks send and not just those of one pipeline stage. The bytes stay the same.
3. Tensors, layer by layer as the engine's loader wants them, form buckets: in none does a rank receive and pack for
   sending more than `bucket_bytes` together (a single larger tensor makes a bucket of its own). A layer's experts
   alternate between the expert-parallel ranks, and `layers_in_flight` layers of as many pipeline stages between these,
   so that in each bucket many ranks send. The engine must hold the layers in flight until they are complete.

Every rank needs each element of its boxes once and takes it from itself if it can, so the bytes over the wire are the
least that the two layouts allow: the sum over ranks of what they need and do not hold. Checked while planning: each
needed box is covered by its atoms exactly once (WeightSyncError naming the tensor).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import zip_longest
from math import isqrt

from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import Box, intersect, numel, whole
from rhymemeg.weight_sync.layouts import ModelLayout, Parameter
from rhymemeg.weight_sync.moves import Atom, Class, Need, Plan, Target, Tensor, members
from rhymemeg.weight_sync.topology import ActorLayout, Ranks

MAX_PARTS = 16
RELAY_ABOVE = 4
"""Remote needers a holder from which relays pay: two hops of sqrt(n) messages each against one of n."""


Cut = tuple[Box, tuple[int, ...], int]
"""A box, the tensor-parallel ranks that hold it, and the number of the need it serves."""


class _Cutter:
    """Step 1: cuts of a tensor, computed once a rule, part and set of needs."""

    def __init__(self, actor: ActorLayout) -> None:
        self.actor = actor
        self._held: dict[tuple[int, str], list[tuple[Box, tuple[int, ...]]]] = {}
        self._cuts: dict[tuple[int, str, tuple[Box, ...]], list[Cut]] = {}

    def held(self, tensor: Tensor) -> list[tuple[Box, tuple[int, ...]]]:
        """Disjoint boxes that cover the tensor, each with the tensor-parallel ranks that hold it."""
        p = tensor.parameter
        key = (id(p.rule), tensor.part.name)
        if key not in self._held:
            size = self.actor.tp if p.expert is None else self.actor.etp
            number = p.rule.parts.index(tensor.part)
            found: dict[Box, list[int]] = defaultdict(list)
            for rank in range(size):
                try:
                    for part, box, _ in p.rule.pieces(rank, size, self.actor.padded_vocab):
                        if part == number:
                            found[box].append(rank)
                except ValueError as error:
                    raise WeightSyncError(f"{p.name}: {error}") from None
            _check_cover(tensor, whole(tensor.shape), list(found))
            self._held[key] = [(box, tuple(ranks)) for box, ranks in found.items()]
        return self._held[key]

    def cuts(self, tensor: Tensor, needs: tuple[Need, ...]) -> list[Cut]:
        boxes = tuple(need.box for need in needs)
        key = (id(tensor.parameter.rule), tensor.part.name, boxes)
        if key not in self._cuts:
            cuts = [
                (common, ranks, number)
                for number, needed in enumerate(boxes)
                for box, ranks in self.held(tensor)
                if (common := intersect(box, needed)) is not None
            ]
            for number, needed in enumerate(boxes):
                _check_cover(tensor, needed, [box for box, _, n in cuts if n == number])
            self._cuts[key] = cuts
        return self._cuts[key]


def _check_cover(tensor: Tensor, outer: Box, boxes: list[Box]) -> None:
    """The boxes, all inside `outer`, cover it exactly once."""
    if sum(map(numel, boxes)) != numel(outer) or any(
        intersect(a, b) is not None for i, a in enumerate(boxes) for b in boxes[:i]
    ):
        raise WeightSyncError(f"{tensor.name}: {boxes} do not cover {outer} exactly once")


def transfer_order(layout: ModelLayout, actor: ActorLayout, layers_in_flight: int = 1) -> list[Parameter]:
    """All parameters in the order in which they travel (step 3)."""
    layers: dict[int | None, list[Parameter]] = defaultdict(list)
    first, last = [], []
    for p in layout.parameters():
        if p.layer is not None:
            layers[p.layer].append(p)
        elif layers:
            last.append(p)
        else:
            first.append(p)
    per_group = max(1, layout.arch.num_experts // actor.ep)
    for parameters in layers.values():
        # Stable: what is no expert stays in front, an expert's own parameters stay together.
        parameters.sort(key=lambda p: -1 if p.expert is None else p.expert % per_group)
    waves: list[list[int]] = []
    if layers_in_flight == 1:
        waves = [[layer] for layer in range(layout.arch.num_layers)]
    else:
        of_stage: dict[int, list[int]] = defaultdict(list)
        for layer, stage in sorted(actor.stage_of_layer.items()):
            of_stage[stage].append(layer)
        stages = [of_stage[stage] for stage in sorted(of_stage)]
        for start in range(0, len(stages), layers_in_flight):
            together = zip_longest(*stages[start : start + layers_in_flight])
            waves += [[layer for layer in wave if layer is not None] for wave in together]
    middle: list[Parameter] = []
    for wave in waves:
        placed = [(place / len(layers[layer]), layer, p) for layer in wave for place, p in enumerate(layers[layer])]
        middle += [p for _, _, p in sorted(placed, key=lambda item: item[:2])]
    return [*first, *middle, *last]


def make_plan(
    layout: ModelLayout,
    actor: ActorLayout,
    target: Target,
    itemsize: int,
    bucket_bytes: int,
    ranks_per_node: int = 8,
    layers_in_flight: int = 1,
    relay_above: float = RELAY_ABOVE,
) -> Plan:
    """See the module's contract. `itemsize`: bytes an element of the model's weights."""
    cutter, holders_of = _Cutter(actor), Holders(layout, actor)
    tensors = [
        Tensor(p.hf_name(part), part.shape, 4 if part.float32 else itemsize, p, part)
        for p in transfer_order(layout, actor, layers_in_flight)
        for part in p.rule.parts
    ]
    classes: list[Class] = []
    index: dict[tuple[int, int], int] = {}
    pending: list[tuple[int, Box, int]] = []
    buckets = _Buckets(bucket_bytes, target.lanes)
    for number, tensor in enumerate(tensors):
        needs = target.needs(tensor)
        p, copies = tensor.parameter, 1
        for box, tp_ranks, need in cutter.cuts(tensor, needs):
            holders, needers = holders_of(p, tp_ranks), needs[need].ranks
            if len(needers) > relay_above * len(holders):
                copies = 2  # a relay packs what it has received
            # Groups of ranks are shared objects, so their identity is a cheap key; equal groups under two
            # identities only make two classes of one.
            key = (id(holders), id(needers))
            if key not in index:
                index[key] = len(classes)
                parts = min(MAX_PARTS, -(-len(holders) // len(needers)))
                classes.append(Class(holders, needers, [0] * parts))
            pending.append((number, box, index[key]))
        held, stages = cutter.held(tensor), holders_of.stages(p)
        buckets.add(number, tensor, needs, held, stages, holders_of.expert_group(p), copies)
    atoms: list[Atom] = []
    for number, box, c in pending:
        sizes = classes[c].part_bytes
        part = sizes.index(min(sizes)) if len(sizes) > 1 else 0
        sizes[part] += numel(box) * tensors[number].itemsize
        atoms.append(Atom(number, box, c, part))
    _choose_sources(classes, actor.world, ranks_per_node, relay_above)
    return Plan(tensors, atoms, classes, buckets.finish(len(tensors)), actor.world, ranks_per_node, target)


class Holders:
    """Ranks that hold what tensor-parallel ranks `tp_ranks` hold of a parameter, all replicas; shared tuples."""

    def __init__(self, layout: ModelLayout, actor: ActorLayout) -> None:
        self.layout, self.actor = layout, actor
        self._known: dict[tuple[tuple[int, ...], int | None, tuple[int, ...]], Ranks] = {}

    def stages(self, p: Parameter) -> tuple[int, ...]:
        """Pipeline stages that hold the parameter."""
        last = self.actor.pp - 1
        if p.layer is not None:
            return (self.actor.stage_of_layer[p.layer],)
        if p.name != "embedding.word_embeddings.weight":
            return (last,)
        # Tied embeddings: the last stage has a copy of its own, kept equal by Megatron, as its output layer.
        return (0, last) if self.layout.arch.tie_word_embeddings and last else (0,)

    def expert_group(self, p: Parameter) -> int | None:
        """Expert-parallel rank that holds the parameter; None if it is not an expert's."""
        return None if p.expert is None else p.expert // (self.layout.arch.num_experts // self.actor.ep)

    def __call__(self, p: Parameter, tp_ranks: tuple[int, ...]) -> Ranks:
        stages, ep = self.stages(p), self.expert_group(p)
        key = (stages, ep, tp_ranks)
        if key not in self._known:
            a = self.actor
            self._known[key] = tuple(
                sorted(
                    rank
                    for s in stages
                    for t in tp_ranks
                    for rank in (a.dense_holders(s, t) if ep is None else a.expert_holders(s, ep, t))
                )
            )
        return self._known[key]


def _choose_sources(classes: list[Class], world: int, ranks_per_node: int, relay_above: float) -> None:
    """Step 2, in place. Deterministic: ties go to the lowest rank."""
    load = [0] * world
    by_node: dict[int, dict[int, list[int]]] = {}
    order = [(size, c, part) for c, group in enumerate(classes) for part, size in enumerate(group.part_bytes)]
    for group in classes:
        group.sources = [[] for _ in group.part_bytes]
    for size, c, part in sorted(order, key=lambda item: (-item[0], item[1], item[2])):
        group = classes[c]
        holders = members(group.holders)
        if id(group.holders) not in by_node:
            nodes: dict[int, list[int]] = defaultdict(list)
            for rank in group.holders:
                nodes[rank // ranks_per_node].append(rank)
            by_node[id(group.holders)] = nodes
        nodes = by_node[id(group.holders)]
        sources = group.sources[part] = list(group.needers)
        far: list[int] = []
        for i, rank in enumerate(group.needers):
            if rank in holders:
                continue
            near = nodes.get(rank // ranks_per_node)
            if near is None:
                far.append(i)
                continue
            source = near[0] if len(near) == 1 else min(near, key=lambda r: (load[r], r))
            sources[i] = source
            load[source] += size
        if len(far) <= relay_above * len(group.holders):
            _serve(far, group.holders, sources, load, size)
            continue
        # By node, the least loaded first; relays are the first of each node, then the second of each, and so on.
        on_node: dict[int, list[int]] = defaultdict(list)
        for i in sorted(far, key=lambda i: (load[group.needers[i]], i)):
            on_node[group.needers[i] // ranks_per_node].append(i)
        turn = {i: number for members in on_node.values() for number, i in enumerate(members)}
        by_turn = sorted(far, key=lambda i: (turn[i], load[group.needers[i]], i))
        relays = by_turn[: isqrt(len(far) * len(group.holders) - 1) + 1]
        _serve(relays, group.holders, sources, load, size)
        relay_of_node: dict[int, list[int]] = defaultdict(list)
        for i in relays:
            relay_of_node[group.needers[i] // ranks_per_node].append(group.needers[i])
        remote: list[int] = []
        for i in by_turn[len(relays) :]:
            near = relay_of_node.get(group.needers[i] // ranks_per_node)
            if near is None:
                remote.append(i)
                continue
            source = min(near, key=lambda r: (load[r], r))
            sources[i] = source
            load[source] += size
        _serve(remote, tuple(group.needers[i] for i in relays), sources, load, size)


def _serve(wanting: list[int], servers: Ranks, sources: list[int], load: list[int], size: int) -> None:
    """Give each of these needers the server that has least to send so far."""
    heap = [(load[rank], rank) for rank in servers]
    heapq.heapify(heap)
    for i in wanting:
        sent, source = heap[0]
        sources[i] = source
        heapq.heapreplace(heap, (sent + size, source))
    for sent, source in heap:
        load[source] = sent


class _Buckets:
    """Step 3. A bucket closes when the next tensor would make some rank receive or pack more than the limit."""

    def __init__(self, limit: int, lanes: int) -> None:
        self.limit, self.lanes = limit, lanes
        self.done: list[range] = []
        self.start = 0
        self._reset()

    def _reset(self) -> None:
        self.receive = [0] * self.lanes
        self.pack: dict[tuple[int, int | None], int] = defaultdict(int)
        self.largest_receive = self.largest_pack = 0

    def add(
        self,
        number: int,
        tensor: Tensor,
        needs: tuple[Need, ...],
        held: list[tuple[Box, tuple[int, ...]]],
        stages: tuple[int, ...],
        ep: int | None,
        copies: int,
    ) -> None:
        size = tensor.itemsize * copies
        shards: dict[int, int] = defaultdict(int)
        for box, ranks in held:
            for rank in ranks:
                shards[rank] += numel(box) * tensor.itemsize
        pack = max(shards.values(), default=0)
        for _ in range(2):
            packed = max(self.pack[s, None] + pack + (0 if ep is None else self.pack[s, ep]) for s in stages)
            received = max((self.receive[x] + numel(n.box) * size for n in needs for x in n.lanes), default=0)
            most = max(received, self.largest_receive) + max(packed, self.largest_pack)
            if most <= self.limit or number == self.start:
                break
            self.done.append(range(self.start, number))
            self.start = number
            self._reset()
        for need in needs:
            for lane in need.lanes:
                self.receive[lane] += numel(need.box) * size
        for s in stages:
            self.pack[s, ep] += pack
        self.largest_receive = max(received, self.largest_receive)
        self.largest_pack = max(packed, self.largest_pack)

    def finish(self, count: int) -> list[range]:
        return [*self.done, range(self.start, count)] if count > self.start else self.done
