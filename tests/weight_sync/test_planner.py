"""The planner against brute force over single elements, on random models and layouts."""

import os
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.arch import ModelArch
from rhymemeg.config import ParallelOptions
from rhymemeg.errors import WeightSyncError
from rhymemeg.parallel.layout_checks import describe_layout
from rhymemeg.weight_sync.boxes import numel, slices
from rhymemeg.weight_sync.layouts import ModelLayout
from rhymemeg.weight_sync.moves import EngineTarget, Move, Plan
from rhymemeg.weight_sync.planner import make_plan
from rhymemeg.weight_sync.topology import ActorLayout, Coordinates, EngineLayout
from tests.weight_sync.models import arch, random_arch
from tests.weight_sync.reference import engine_slice, megatron_shard, numbered

ITEMSIZE = 2
EXAMPLES = int(os.environ.get("WEIGHT_SYNC_EXAMPLES", "60"))
"""Random cases a property; docs/weight_sync.md says how to run thousands."""


@dataclass
class Case:
    arch: ModelArch
    actor: ActorLayout
    engines: EngineLayout
    ranks_per_node: int
    bucket_bytes: int
    layers_in_flight: int
    relay_above: float

    def plan(self) -> Plan:
        return make_plan(
            ModelLayout(self.arch),
            self.actor,
            EngineTarget(self.engines, self.arch.num_experts),
            ITEMSIZE,
            self.bucket_bytes,
            self.ranks_per_node,
            self.layers_in_flight,
            self.relay_above,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any sizes that fit, any assignment of layers to stages, ranks in any order."""
    tp, ep, etp, engine_tp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    a = draw(random_arch(max(tp, engine_tp), max(etp, engine_tp), ep))
    if not a.is_moe:
        ep, etp = 1, tp
    pp = draw(st.integers(1, a.num_layers))
    stage = int(np.lcm(tp, ep * etp)) * draw(st.integers(1, 2))
    stage *= engine_tp // int(np.gcd(engine_tp, pp * stage))
    stage_of = [draw(st.integers(0, pp - 1)) for _ in range(a.num_layers)]
    layers = [tuple(i for i, s in enumerate(stage_of) if s == p) for p in range(pp)]
    ranks = [Coordinates(r % tp, p, r // etp % ep, r % etp, layers[p]) for p in range(pp) for r in range(stage)]
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    padded = a.padded_vocab_size(draw(st.sampled_from([1, 3])), tp)
    actor = ActorLayout(tuple(ranks), tp, pp, ep, etp, padded)
    whole = draw(st.sampled_from([False, False, False, True]))
    engines = EngineLayout(len(ranks), engine_tp, a.is_moe and draw(st.booleans()), whole)
    node, bucket = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([200, 5000, 10**9]))
    return Case(a, actor, engines, node, bucket, draw(st.integers(1, 3)), draw(st.sampled_from([0.5, 1, 4])))


def held_elements(case: Case, hf: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """Whole tensors with the elements that this rank's shards hold, 0 elsewhere."""
    c, a = case.actor.ranks[rank], case.actor
    layout = ModelLayout(case.arch)
    names = [p.name for layer in c.layers for p in layout.layer_parameters(layer)]
    names += ["embedding.word_embeddings.weight"] if c.pp == 0 else []
    if c.pp == a.pp - 1:
        names += ["decoder.final_layernorm.weight"]
        names += [] if case.arch.tie_word_embeddings and a.pp == 1 else ["output_layer.weight"]
    values: list[np.ndarray] = []
    for name in names:
        expert = int(name.split("local_experts.")[1].split(".")[0]) if "local_experts" in name else None
        if expert is None:
            values.append(megatron_shard(case.arch, hf, name, c.tp, a.tp, a.padded_vocab))
        elif expert // (case.arch.num_experts // a.ep) == c.ep:
            values.append(megatron_shard(case.arch, hf, name, c.etp, a.etp, a.padded_vocab))
    return only(hf, values)


def needed_elements(case: Case, hf: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    e = case.engines
    if e.whole:
        return hf
    return only(hf, [engine_slice(case.arch, n, full, rank % e.tp, e.tp, e.expert_parallel) for n, full in hf.items()])


def only(hf: dict[str, np.ndarray], values: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The whole tensors with 0 for every element whose number is not among `values`."""
    present = np.zeros(sum(full.size for full in hf.values()) + 1, bool)
    for some in values:
        present[some.ravel()] = True
    present[0] = False
    return {name: np.where(present[full], full, 0) for name, full in hf.items()}


@settings(max_examples=EXAMPLES)
@given(cases())
def test_every_needed_element_arrives_once_over_the_least_wire(case: Case) -> None:
    hf, plan, world = numbered(case.arch), case.plan(), case.actor.world
    held = [held_elements(case, hf, rank) for rank in range(world)]
    needed = [needed_elements(case, hf, rank) for rank in range(world)]
    arrived = [{name: np.zeros(full.shape, int) for name, full in hf.items()} for _ in range(world)]
    received = [0] * world
    for move in plan.moves():
        name, at = plan.tensors[move.tensor].name, slices(move.box)
        values = held[move.source][name][at]
        if not (values != 0).all():  # a relay: has it from an earlier move
            values = arrived[move.source][name][at]
            assert move.source != move.target
        assert (values != 0).all(), f"rank {move.source} does not hold {name}{move.box}"
        assert (arrived[move.target][name][at] == 0).all(), "written twice"
        arrived[move.target][name][at] = values
        if move.source != move.target:
            received[move.target] += values.size * plan.tensors[move.tensor].itemsize
            assert_nearest(case, move, held, name)
    least = 0
    for rank in range(world):
        for tensor in plan.tensors:
            np.testing.assert_array_equal(arrived[rank][tensor.name], needed[rank][tensor.name])
            missing = (needed[rank][tensor.name] != 0) & (held[rank][tensor.name] == 0)
            least += int(missing.sum()) * tensor.itemsize
    traffic = plan.traffic()
    assert traffic.received == received
    assert sum(traffic.received) == sum(traffic.sent) == least == plan.least_wire_bytes()


def assert_nearest(case: Case, move: Move, held: list[dict[str, np.ndarray]], name: str) -> None:
    """A slice comes over the wire only if the target does not hold it, from its node if somebody there does."""
    holders = [r for r, tensors in enumerate(held) if (tensors[name][slices(move.box)] != 0).all()]
    node = case.ranks_per_node
    assert move.target not in holders
    if any(r // node == move.target // node for r in holders):
        assert move.source // node == move.target // node


@settings(max_examples=EXAMPLES // 2)
@given(cases())
def test_programs_of_the_ranks_are_the_plan(case: Case) -> None:
    """The ranks' own parts together are all moves, the two ends of each message agree, and buckets keep their size."""
    plan = case.plan()
    programs = [plan.program(rank) for rank in range(plan.world)]
    moves = {(m.source, m.target, m.tensor, m.box) for m in plan.moves()}
    sent = {(r, t, *i) for r, p in enumerate(programs) for b in p for h in b.hops for t, x in h.send.items() for i in x}
    got = {
        (s, r, *i) for r, p in enumerate(programs) for b in p for h in b.hops for s, x in h.receive.items() for i in x
    }
    local = {(r, r, *i) for r, p in enumerate(programs) for b in p for i in b.local}
    assert sent == got
    assert sent | local == moves
    assert [i for bucket in plan.buckets for i in bucket] == list(range(len(plan.tensors)))
    for number, bucket in enumerate(plan.buckets):
        size = {i: plan.tensors[i].itemsize for i in bucket}
        for rank in range(plan.world):
            first, second = programs[rank][number].hops
            for hop, messages in enumerate((first.send, second.send)):
                for target, items in messages.items():
                    assert programs[target][number].hops[hop].receive[rank] == items
            arrived = {item for items in first.receive.values() for item in items}
            assert all(item in arrived for items in second.send.values() for item in items)
            packed = sum(
                numel(box) * size[i]
                for hop in (first, second)
                for i, box in {x for items in hop.send.values() for x in items}
            )
            taken = sum(numel(b) * size[i] for h in (first, second) for x in h.receive.values() for i, b in x)
            assert len(bucket) == 1 or packed + taken <= case.bucket_bytes


def layout_of(a: ModelArch, world: int, **sizes: int) -> ActorLayout:
    parallel = ParallelOptions(**sizes)
    padded = a.padded_vocab_size(128, parallel.tensor_model_parallel_size)
    return ActorLayout.planned(describe_layout(a, parallel, world), padded)


@pytest.mark.parametrize("order", ["tp", "moe"])
def test_coordinates_are_megatrons(order: str) -> None:
    """Rank order of the planned layout: TP fastest, then DP, then PP; experts: ETP, EP, expert DP."""
    a = arch("Qwen3MoeForCausalLM")
    layout = layout_of(
        a,
        16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    assert layout.ranks[5] == Coordinates(tp=1, pp=0, ep=1, etp=0, layers=(0, 1))
    assert layout.dense_holders(1, 0) == (8, 10, 12, 14)
    assert layout.expert_holders(0, 3, 0) == (3, 7)


def test_replicas_share_the_load() -> None:
    """PP 2 x DP 8 to engines of TP 1: each stage's replicas serve the other stage evenly."""
    a = arch("LlamaForCausalLM")
    actor = layout_of(a, 16, pipeline_model_parallel_size=2)
    plan = make_plan(ModelLayout(a), actor, EngineTarget(EngineLayout(16)), 2, 1 << 30, ranks_per_node=1)
    sent = plan.traffic().sent
    for stage in (sent[:8], sent[8:]):
        assert max(stage) == min(stage) > 0


def test_one_needer_is_served_by_all_replicas() -> None:
    """Fewer needers than holders: the bytes are cut so that every holder sends a part."""
    a = arch("LlamaForCausalLM")
    actor = layout_of(a, 8, pipeline_model_parallel_size=2)
    engines = EngineLayout(8, 8) if a.num_attention_heads % 8 == 0 else EngineLayout(8, 4)
    plan = make_plan(ModelLayout(a), actor, EngineTarget(engines), 2, 1 << 30, ranks_per_node=1)
    sent = plan.traffic().sent
    assert min(sent) > 0.5 * max(sent)


def test_relays_spread_the_load() -> None:
    """8 ranks of a stage serve 56 others: directly each sends every slice 7 times at once, with relays at most 5 times."""
    a = arch("LlamaForCausalLM", num_hidden_layers=8)
    actor = layout_of(a, 64, pipeline_model_parallel_size=8)
    most_sends = {}
    for relay_above in (1, 1e9):
        plan = make_plan(
            ModelLayout(a), actor, EngineTarget(EngineLayout(64)), 2, 1, ranks_per_node=8, relay_above=relay_above
        )
        assert sum(plan.traffic().received) == plan.least_wire_bytes()
        programs = [plan.program(rank) for rank in range(64)]
        most_sends[relay_above] = max(len(hop.send) for p in programs for bucket in p for hop in bucket.hops)
    assert most_sends[1e9] >= 7 and most_sends[1] <= 5


def test_equal_layouts_move_nothing() -> None:
    a = arch("Qwen3ForCausalLM", vocab_size=256)
    actor = layout_of(a, 4, tensor_model_parallel_size=2)
    plan = make_plan(ModelLayout(a), actor, EngineTarget(EngineLayout(4, 2)), 2, 1 << 30)
    assert sum(plan.traffic().received) == 0
    assert all(not h.send and not h.receive for rank in range(4) for b in plan.program(rank) for h in b.hops)


def test_an_engine_that_does_not_fit_is_refused_by_name() -> None:
    a = arch("Qwen3ForCausalLM", intermediate_size=20)
    with pytest.raises(WeightSyncError, match=r"engine of tp=8.*q_proj|engine of tp=8.*proj"):
        make_plan(ModelLayout(a), layout_of(a, 8), EngineTarget(EngineLayout(8, 8)), 2, 1 << 30)


def test_plans_are_deterministic() -> None:
    a = arch("Qwen3MoeForCausalLM")
    actor = layout_of(a, 8, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    plans = [make_plan(ModelLayout(a), actor, EngineTarget(EngineLayout(8, 2), 4), 2, 5000) for _ in range(2)]
    assert list(plans[0].moves()) == list(plans[1].moves())
    assert plans[0].buckets == plans[1].buckets
