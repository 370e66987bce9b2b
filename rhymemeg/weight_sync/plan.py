"""What a weight update would cost, without any GPU or process group:

    python -m rhymemeg.weight_sync.plan --model config.json --actor tp=8,pp=16,ep=32,etp=1,dp=16 --engine tp=8 --json

Prints the moves, the bytes over the wire and copied locally, the least that any plan could move, the load of the
busiest ranks, planning time and memory, an estimate of the seconds for given bandwidths (bucket by bucket, as the
transfer goes, and if all of it could go at once), and the same figures for trainers that gather every tensor on every
rank. Layouts that do not fit the model are refused as in a run.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rhymemeg.arch import ModelArch
from rhymemeg.config import ParallelOptions
from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.parallel.layout_checks import check_layout, check_world_size, describe_layout
from rhymemeg.weight_sync.boxes import numel, whole
from rhymemeg.weight_sync.deepseek import describe
from rhymemeg.weight_sync.layouts import ModelLayout
from rhymemeg.weight_sync.moves import EngineTarget, Plan
from rhymemeg.weight_sync.planner import Holders, make_plan
from rhymemeg.weight_sync.topology import ActorLayout, EngineLayout

ACTOR_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "vpp_layers": "num_layers_per_virtual_pipeline_stage",
}
DTYPE_BYTES = {"bf16": 2, "fp32": 4}


def parse_sizes(text: str, option: str, known: set[str]) -> dict[str, int]:
    """'tp=8,pp=2' -> {'tp': 8, 'pp': 2}."""
    sizes: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in known or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"{option}: {item!r} is not one of {', '.join(sorted(known))} with a positive number")
        sizes[key] = int(value)
    return sizes


def actor_options(sizes: dict[str, int]) -> tuple[ParallelOptions, int]:
    """Options of a run with these sizes, and its world size (`world`, or tp x pp x cp x dp)."""
    parallel = ParallelOptions(**{ACTOR_KEYS[key]: value for key, value in sizes.items() if key in ACTOR_KEYS})
    product = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    world = sizes.get("world", product * sizes.get("dp", 1))
    if "dp" in sizes and world != product * sizes["dp"]:
        raise ConfigError(f"--actor: world={world} is not tp x pp x cp x dp = {product * sizes['dp']}")
    return parallel, world


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second of one rank in one direction: to ranks of its node, and to other nodes."""

    node: float
    network: float

    def seconds(self, near: Loads, far: Loads) -> float:
        """Time until the busiest rank is done, each link and direction working on its own."""
        return max(max(map(np.max, near)) / self.node, max(map(np.max, far)) / self.network)


Loads = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]
"""Bytes received and sent, by rank."""


def estimated_seconds(plan: Plan, bandwidths: Bandwidths) -> float:
    """The transfer goes step by step: a bucket's first hop together with the second hop of the bucket before. Its time
    is the sum over steps of the busiest rank's time."""
    world, node = plan.world, plan.ranks_per_node
    # What a byte of a class and part adds: (targets, sources, times that each source sends), within nodes and across,
    # in the first hop; then the same in the second.
    wires: dict[tuple[int, int], list[tuple[Any, Any, Any]]] = {}
    for c, group in enumerate(plan.classes):
        targets, holders = np.asarray(group.needers), np.asarray(group.holders)
        for part, chosen in enumerate(group.sources):
            sources = np.asarray(chosen)
            same, first = targets // node == sources // node, np.isin(sources, holders)
            near = same & (targets != sources)
            masks = (near & first, ~same & first, near & ~first, ~same & ~first)
            wires[c, part] = [(targets[m], *np.unique(sources[m], return_counts=True)) for m in masks]
    seconds, atoms = 0.0, iter(plan.atoms)
    atom = next(atoms, None)
    relayed: dict[tuple[int, int], int] = {}
    for bucket in [*plan.buckets, range(len(plan.tensors), len(plan.tensors))]:
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        while atom is not None and atom.tensor < bucket.stop:
            sizes[atom.group, atom.part] += numel(atom.box) * plan.tensors[atom.tensor].itemsize
            atom = next(atoms, None)
        near, far = ((np.zeros(world), np.zeros(world)) for _ in range(2))
        for hop, moved in ((0, sizes), (1, relayed)):
            for key, size in moved.items():
                links = wires[key][2 * hop : 2 * hop + 2]
                for (received, sent), (targets, sources, times) in zip((near, far), links):
                    received[targets] += size
                    sent[sources] += size * times
        seconds += bandwidths.seconds(near, far)
        relayed = sizes
    return seconds


def figures(plan: Plan, bandwidths: Bandwidths) -> dict[str, Any]:
    """Traffic of the plan, in bytes."""
    traffic = plan.traffic()
    received, sent = traffic.received, traffic.sent
    return {
        "moves": plan.num_moves(),
        "buckets": len(plan.buckets),
        "wire_bytes": sum(received),
        "least_wire_bytes": plan.least_wire_bytes(),
        "wire_bytes_in_node": sum(traffic.received_near),
        "wire_bytes_across_nodes": sum(traffic.received_far),
        "received_bytes_largest": max(received),
        "received_bytes_mean": sum(received) / plan.world,
        "sent_bytes_largest": max(sent),
        "sent_bytes_mean": sum(sent) / plan.world,
        "local_bytes": sum(traffic.local),
        "estimated_seconds": estimated_seconds(plan, bandwidths),
        "estimated_seconds_all_at_once": bandwidths.seconds(
            (np.asarray(traffic.received_near), np.asarray(traffic.sent_near)),
            (np.asarray(traffic.received_far), np.asarray(traffic.sent_far)),
        ),
    }


def gather_figures(layout: ModelLayout, actor: ActorLayout, itemsize: int, bandwidths: Bandwidths) -> dict[str, Any]:
    """The design of trainers that gather: every rank receives every tensor whole, whatever its engine needs of it.

    A rank receives the model less what it holds. The estimate grants it the best case, in which all of that comes at
    the speed of one rank's network link and nobody has to send more than that."""
    model = 0
    dense: dict[tuple[int, int], int] = defaultdict(int)
    expert: dict[tuple[int, int, int], int] = defaultdict(int)
    holders = Holders(layout, actor)
    for p in layout.parameters():
        for part in p.rule.parts:
            model += numel(whole(part.shape)) * (4 if part.float32 else itemsize)
        size = actor.tp if p.expert is None else actor.etp
        group = holders.expert_group(p)
        for rank in range(size):
            for number, box, _ in p.rule.pieces(rank, size, actor.padded_vocab):
                held = numel(box) * (4 if p.rule.parts[number].float32 else itemsize)
                for stage in holders.stages(p):
                    if group is None:
                        dense[stage, rank] += held
                    else:
                        expert[stage, group, rank] += held
    received = [model - dense[c.pp, c.tp] - expert[c.pp, c.ep, c.etp] for c in actor.ranks]
    return {
        "wire_bytes": sum(received),
        "received_bytes_largest": max(received),
        "received_bytes_mean": sum(received) / actor.world,
        "estimated_seconds": max(received) / bandwidths.network,
    }


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed. Raises ConfigError for sizes that do not fit."""
    try:
        config = json.loads(Path(arguments.model).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: cannot read {arguments.model}: {error}") from None
    arch: ModelArch = describe(config, arguments.model)
    parallel, world = actor_options(parse_sizes(arguments.actor, "--actor", {*ACTOR_KEYS, "dp", "world"}))
    engine = parse_sizes(arguments.engine, "--engine", {"tp", "expert_parallel"})
    # Sequence parallelism changes no weight, but experts with TP demand it of a run.
    parallel.sequence_parallel = parallel.tensor_model_parallel_size > 1
    check_world_size(parallel, world)
    check_layout(arch, parallel, world, "cuda")
    try:
        engines = EngineLayout(world, engine.get("tp", 1), engine.get("expert_parallel", 0) > 0)
    except ValueError as error:
        raise ConfigError(f"--engine: {error}") from None
    bandwidths = Bandwidths(arguments.node_gb_per_s * 1e9, arguments.network_gb_per_s * 1e9)
    return update_figures(
        arch,
        parallel,
        engines,
        bandwidths,
        itemsize=DTYPE_BYTES[arguments.dtype],
        bucket_bytes=arguments.bucket_mib << 20,
        ranks_per_node=arguments.ranks_per_node,
        layers_in_flight=arguments.layers_in_flight,
        make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by,
        rank=arguments.rank,
    )


def update_figures(
    arch: ModelArch,
    parallel: ParallelOptions,
    engines: EngineLayout,
    bandwidths: Bandwidths,
    *,
    itemsize: int = 2,
    bucket_bytes: int = 512 << 20,
    ranks_per_node: int = 8,
    layers_in_flight: int = 1,
    make_vocab_size_divisible_by: int = 128,
    rank: int = 0,
) -> dict[str, Any]:
    """The figures of one update, for a layout that has been checked. `rank` is the one whose own part is timed."""
    start, start_cpu = time.perf_counter(), time.process_time()
    layout = ModelLayout(arch)
    padded = arch.padded_vocab_size(make_vocab_size_divisible_by, parallel.tensor_model_parallel_size)
    actor = ActorLayout.planned(describe_layout(arch, parallel, engines.world), padded)
    target = EngineTarget(engines, arch.num_experts)
    plan = make_plan(layout, actor, target, itemsize, bucket_bytes, ranks_per_node, layers_in_flight)
    planned, planned_cpu = time.perf_counter(), time.process_time()
    plan.program(rank)
    one_rank, one_rank_cpu = time.perf_counter() - planned, time.process_time() - planned_cpu
    return {
        "model": arch.architecture,
        "model_bytes": sum(numel(whole(t.shape)) * t.itemsize for t in plan.tensors),
        "tensors": len(plan.tensors),
        "ranks": engines.world,
        "engines": engines.world // engines.tp,
        "plan": figures(plan, bandwidths),
        "gather": gather_figures(layout, actor, itemsize, bandwidths),
        "planning_seconds": planned - start,
        "planning_cpu_seconds": planned_cpu - start_cpu,
        "planning_seconds_one_rank": one_rank,
        "planning_cpu_seconds_one_rank": one_rank_cpu,
        "planning_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m rhymemeg.weight_sync.plan", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", required=True, help="config.json of the model")
    p.add_argument("--actor", default="", help=f"sizes: {', '.join(sorted([*ACTOR_KEYS, 'dp', 'world']))}")
    p.add_argument("--engine", default="", help="sizes: tp, expert_parallel (1: experts whole, 0: each split)")
    p.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="type of the weights (bf16)")
    p.add_argument("--ranks-per-node", type=int, default=8, help="(8)")
    p.add_argument("--node-gb-per-s", type=float, default=300.0, help="a rank's link within its node, GB/s (300)")
    p.add_argument("--network-gb-per-s", type=float, default=50.0, help="a rank's link to other nodes, GB/s (50)")
    p.add_argument("--bucket-mib", type=int, default=512, help="size of a bucket, MiB (512)")
    p.add_argument("--layers-in-flight", type=int, default=1, help="layers that travel at the same time (1)")
    p.add_argument("--make-vocab-size-divisible-by", type=int, default=128, help="as in a run (128)")
    p.add_argument("--rank", type=int, default=0, help="rank whose own part is timed (0)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return p


def lines(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """The report for people: bytes in GB, a line a figure."""
    out = []
    for key, value in tree.items():
        if isinstance(value, dict):
            out += lines(value, f"{key}: ")
        elif "bytes" in key:
            out.append(f"{prefix}{key.replace('_', ' ')}: {value / 1e9:,.3f} GB")
        else:
            out.append(f"{prefix}{key.replace('_', ' ')}: {f'{value:,.3f}' if isinstance(value, float) else value}")
    return out


def main(words: list[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    try:
        for name in (
            "ranks_per_node",
            "node_gb_per_s",
            "network_gb_per_s",
            "bucket_mib",
            "layers_in_flight",
            "make_vocab_size_divisible_by",
        ):
            if not 0 < (value := getattr(arguments, name)) < 1e9:
                raise ConfigError(f"--{name.replace('_', '-')}: {value} is not a number above 0")
        result = report(arguments)
    except RhymeMegError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
