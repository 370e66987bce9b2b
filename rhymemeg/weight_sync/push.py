"""After each training step, every engine serves the actor's weights: `WeightSync.push(version)`.

The plan (`planner.py`) is made once. A push then

1. checks that every weight of the actor is finite;
2. moves slices to the engines' ranks (`transfer.py`) and hands them to the engine's own loader as an iterator over
   every Hugging Face tensor of the model, in order, each holding only what the rank's loader will read (`partial.py`);
   the engine refuses if requests run, compares the set of names,
   packs or quantises as its layers want, and drops its prefix cache;
3. verifies, as `--weight-sync-verify` says, that what the engine's loader put into the engine is what the actor holds,
   by checksums (`verify.py`) of every tensor (`full`) or of a subset that rotates through all within `ROTATION` pushes
   (`sampled`).

All ranks call `push` together. Any failure on one rank is the same WeightSyncError on all, naming the tensor; the
transfer is first run to its end, so that no rank waits for another.

`EngineLayout.whole` (baseline) brings complete tensors to every rank, as trainers that gather do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from rhymemeg.arch import ModelArch
from rhymemeg.config import SyncOptions
from rhymemeg.errors import RhymeMegError, WeightSyncError
from rhymemeg.weight_sync.actor_side import actor_layout, local_params
from rhymemeg.weight_sync.layouts import ModelLayout
from rhymemeg.weight_sync.moves import EngineTarget
from rhymemeg.weight_sync.partial import absent_tensor, partial_tensor
from rhymemeg.weight_sync.planner import RELAY_ABOVE, make_plan
from rhymemeg.weight_sync.topology import EngineLayout
from rhymemeg.weight_sync.transfer import Courier, Delivery, held_views
from rhymemeg.weight_sync.verify import ROTATION, Verifier

if TYPE_CHECKING:
    from rhymemeg.parallel.runtime import Runtime

__all__ = ["ROTATION", "Engine", "WeightSync"]


class Engine(Protocol):
    """What a push needs of `rhymemeg.rollout.engine.RolloutEngine`."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...


def _layout_of(engine: Any, world_size: int) -> EngineLayout:
    spec = engine.spec
    return EngineLayout(world_size, spec.tensor_parallel_size, spec.enable_expert_parallel)


class WeightSync:
    def __init__(
        self,
        arch: ModelArch,
        options: SyncOptions,
        runtime: Runtime,
        chunks: Sequence[torch.nn.Module],
        engine: Engine,
        engines: EngineLayout | None = None,
        ranks_per_node: int | None = None,
        relay_above: float = RELAY_ABOVE,
    ) -> None:
        """`engines`: their layout; None: that of `engine`. `ranks_per_node`: None: as torchrun says. `relay_above`: see
        `planner.py`."""
        self.arch, self.options, self.runtime = arch, options, runtime
        self.chunks, self.engine = chunks, engine
        self.layout = ModelLayout(arch)
        self.actor = actor_layout(chunks, arch, runtime)
        self.engines = engines or _layout_of(engine, runtime.world_size)
        params = local_params(chunks, arch, runtime)
        self.dtype: torch.dtype = runtime.broadcast_object(next(iter(params.values())).dtype)
        start = time.perf_counter()
        self.plan = make_plan(
            self.layout,
            self.actor,
            EngineTarget(self.engines, arch.num_experts),
            self.dtype.itemsize,
            options.update_weight_buffer_size,
            ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size)),
            relay_above=relay_above,
        )
        self.seconds_planning = time.perf_counter() - start
        # A group of its own: the order of its operations depends on no other part of the program.
        self.group = dist.new_group(backend=runtime.backend, timeout=runtime.timeout)
        # NCCL creates a group's communicator at its first operation, in which all ranks must take part.
        dist.all_reduce(torch.zeros(1, device=runtime.device), group=self.group)
        self.courier = Courier(self.plan, runtime.rank, self.group, runtime.device, self.dtype, runtime.timeout)
        self._loading = "the first tensor"
        self.verifier = Verifier(self.plan, runtime, options.weight_sync_verify)

    def push(self, version: int) -> dict[str, float]:
        """Every engine serves the actor's present weights as `version` when this returns. Returns metrics `sync/*`."""
        started = time.perf_counter()
        params = local_params(self.chunks, self.arch, self.runtime)
        self._refuse_non_finite(params)
        checked = time.perf_counter()
        held = held_views(params, self.layout, self.actor, self.runtime.rank)
        check = self.verifier.begin(version, held)
        deliveries = self.courier.deliver(held)
        error: Exception | None = None
        try:
            model = self._engine_model()
            with check.observing(model):
                self.engine.load_weights(
                    self._weights(check.watch(deliveries) if model is None else deliveries), version
                )
        except RhymeMegError as problem:
            error = problem
        except Exception as problem:
            what = f"{type(problem).__name__}: {problem}"
            error = WeightSyncError(f"version {version}: the engine's loader failed at {self._loading!r}: {what}")
            error.__cause__ = problem
        for _ in deliveries:  # what the engine did not take: other ranks wait for this one's part
            pass
        self._agree(error)
        loaded = time.perf_counter()
        self._agree(check.finish())
        done = time.perf_counter()
        return {
            "sync/version": float(version),
            "sync/bytes_received": float(self.courier.bytes_received),
            "sync/bytes_sent": float(self.courier.bytes_sent),
            "sync/buckets": float(len(self.plan.buckets)),
            "sync/tensors": float(len(self.plan.tensors)),
            "sync/tensors_verified": float(check.count),
            "sync/seconds_finite_check": checked - started,
            "sync/seconds_transfer_and_load": loaded - checked,
            "sync/seconds_verify": done - loaded,
        }

    def _engine_model(self) -> torch.nn.Module | None:
        """The engine's module of this rank, if it is a vLLM engine."""
        vllm = getattr(self.engine, "vllm", None)
        return None if vllm is None else vllm.model

    def _weights(self, deliveries: Iterator[Delivery]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model, each with the part that this rank's loader will read."""
        for tensor, box, data in deliveries:
            self._loading = tensor.name
            if box is None or data is None:
                dtype = self.courier.dtype_of(tensor)
                yield tensor.name, absent_tensor(tensor.shape, dtype, self.runtime.device, tensor.name)
            else:
                yield tensor.name, partial_tensor(data, box, tensor.shape, tensor.name)

    def _refuse_non_finite(self, params: dict[str, torch.Tensor]) -> None:
        names = list(params)
        finite = torch.stack([torch.isfinite(params[name]).all() for name in names]).tolist()
        bad = [name for name, ok in zip(names, finite) if not ok]
        more = f" (and {len(bad) - 1} more parameters)" if len(bad) > 1 else ""
        self._agree(WeightSyncError(f"{bad[0]} of the actor has values that are not finite{more}") if bad else None)

    def _agree(self, error: Exception | None) -> None:
        """Every rank calls this at the same point. If any brings an error, all raise the first one's."""
        messages = self.runtime.all_gather_object(None if error is None else str(error))
        for rank, message in enumerate(messages):
            if message is not None:
                raise WeightSyncError(message if rank == self.runtime.rank else f"rank {rank}: {message}") from error
