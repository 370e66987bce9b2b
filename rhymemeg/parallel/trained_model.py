"""A Megatron model with its optimizer, on whatever layout the run has: what the actor and the critic have in common.

A subclass says what the last pipeline stage returns and what becomes of it: `outputs(work, raw) -> tensors [b, s]`. The
rest is here: micro-batches padded to what the layout wants, Megatron's schedule over them, gradients, optimizer steps,
checkpoints.

Every method is called by all ranks. Micro-batches are those of this rank's data-parallel index (the same on all its
tensor, pipeline and context ranks); their number is the same on all data-parallel ranks, their shapes need not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config, OptimizerOptions
from rhymemeg.errors import TrainingError
from rhymemeg.parallel.context_parallel import gather_rows, held_positions
from rhymemeg.parallel.cpu_backend import megatron_calls
from rhymemeg.parallel.lr_schedule import check_schedule, learning_rate
from rhymemeg.parallel.model import ActorModel, build_model, params_dtype, uses_equal_shapes
from rhymemeg.parallel.pipeline import schedule_arguments
from rhymemeg.parallel.router_replay import Recorded, RoutingControl
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rl.batching import MicroBatch

Metrics = dict[str, Tensor]


@dataclass
class Work:
    """A micro-batch as it goes through the pipeline: `tokens`, `labels` and `real` (False at padding) are padded and,
    under context parallelism, this rank's part. `source` is None for a filler that only completes the schedule. `routing`
    and `recorded` are of `router_replay`."""

    index: int
    source: MicroBatch | None
    tokens: Tensor
    labels: Tensor
    real: Tensor
    routing: Tensor | Recorded | None = None
    recorded: Recorded = field(default_factory=dict)

    def rows(self, values: Tensor) -> Tensor:
        """Values of this work's tokens, [s, b] as Megatron orders them, as [b, s] of the micro-batch: parts of context
        ranks put together, padding cut off."""
        whole = gather_rows(values.t(), ps.get_context_parallel_group())
        if self.source is None:
            return whole
        b, s = self.source.shape
        return whole[:b, :s]


Outputs = Callable[[Work, Tensor], tuple[Tensor, ...]]


class TrainedModel:
    """See the module. `chunks` are the unwrapped model chunks of this rank, one a virtual stage; `updates` counts the
    optimizer steps done; `recorded` is the routing that the last `evaluate` found, by micro-batch (MoE only)."""

    role: ClassVar[str]
    """Prefix of the metrics, and the name in errors."""

    def __init__(
        self,
        config: Config,
        arch: ModelArch,
        runtime: Runtime,
        optimizer: OptimizerOptions,
        kind: type[ActorModel] = ActorModel,
    ) -> None:
        self.config, self.arch, self.runtime = config, arch, runtime
        self.optimizer_options = optimizer
        self.updates = 0
        self._updates_per_step = config.algorithm.ppo_epochs * config.algorithm.num_minibatches
        check_schedule(optimizer, config.run.train_iters)
        self.chunks: list[torch.nn.Module] = list(build_model(arch, config.model, config.parallel, runtime, kind))
        self.recorded: list[Recorded] = []
        self._routing: RoutingControl | None = None
        if arch.is_moe:
            self._routing = RoutingControl(
                self.chunks, arch, runtime, config.moe.moe_aux_loss_coeff, config.model.recompute_activations
            )
        self._is_last_stage = runtime.pp_rank == runtime.pp_size - 1
        self._model_config: Any = self.chunks[0].config
        with megatron_calls():
            self._ddp = self._wrap()
            self.optimizer = self._make_optimizer()
        c: Any = self._model_config
        c.finalize_model_grads_func = _finalize
        if config.parallel.overlap_grad_reduce:
            hooks = [(ddp.no_sync, ddp.start_grad_sync) for ddp in self._ddp]
            c.no_sync_func, c.grad_sync_func = ([h[i] for h in hooks] for i in (0, 1))
            if len(hooks) == 1:
                c.no_sync_func, c.grad_sync_func = hooks[0]

    @property
    def wrapped(self) -> list[DistributedDataParallel]:
        """`chunks` in Megatron's wrappers, which hold the gradient buffers."""
        return self._ddp

    def _wrap(self) -> list[DistributedDataParallel]:
        p = self.config.parallel
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=p.use_distributed_optimizer,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=p.overlap_grad_reduce,
            overlap_param_gather=p.overlap_param_gather,
        )
        # Only the first chunk is cut into buckets: the reductions of later ones hide behind its backward pass.
        return [
            DistributedDataParallel(self._model_config, options, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]

    def _make_optimizer(self) -> Any:
        o = self.optimizer_options
        dtype = params_dtype(self.config.model, self.runtime.device_type)
        options = OptimizerConfig(
            optimizer="adam",
            lr=o.lr,
            min_lr=o.min_lr,
            weight_decay=o.weight_decay,
            adam_beta1=o.adam_beta1,
            adam_beta2=o.adam_beta2,
            adam_eps=o.adam_eps,
            clip_grad=o.clip_grad,
            use_distributed_optimizer=self.config.parallel.use_distributed_optimizer,
            overlap_param_gather=self.config.parallel.overlap_param_gather,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        )
        return get_megatron_optimizer(options, self._ddp)

    # ------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, folder: str | Path) -> None:
        """Read a Hugging Face checkpoint into the model; each rank reads only its part."""
        from rhymemeg.weight_sync.hf_io import load_hf_checkpoint

        load_hf_checkpoint(self.chunks, self.arch, str(folder), self.runtime)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Call after writing to the parameters of `chunks`: the optimizer's fp32 masters take their values."""
        with megatron_calls():
            self.optimizer.reload_model_params()

    # ------------------------------------------------------------------------------------------------- forward passes

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], outputs: Outputs, count: int) -> list[tuple[Tensor, ...]]:
        """The `count` tensors [b, s] of `outputs`, fp32, for each micro-batch, on all ranks of this data-parallel
        index. Values at padding mean nothing. No gradient."""
        found: dict[int, Tensor] = {}

        def keep(work: Work, raw: Tensor) -> tuple[Tensor, Metrics]:
            values = outputs(work, raw)
            if work.source is not None:
                found[work.index] = torch.stack(values)
            return values[0].sum(), {}

        for ddp in self._ddp:
            ddp.eval()
        works = self._prepare(micro_batches)
        self._run(works, keep, forward_only=True)
        self.recorded = [work.recorded for work in works[: len(micro_batches)]]
        results = []
        for i, micro_batch in enumerate(micro_batches):
            shape = (count, *micro_batch.shape)
            whole = found[i] if i in found else torch.empty(shape, device=self.runtime.device)
            if self.runtime.pp_size > 1:
                group = ps.get_pipeline_model_parallel_group()
                dist.broadcast(whole, ps.get_pipeline_model_parallel_last_rank(), group=group)
            results.append(tuple(whole.unbind()))
        return results

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> list[Work]:
        """Pad to what the layout wants: lengths to a multiple of the ranks that share a sequence, the number to a
        multiple of the pipeline under virtual stages, shapes to one where the expert dispatcher needs it."""
        r, p = self.runtime, self.config.parallel
        unit = (r.tp_size if p.sequence_parallel else 1) * (2 * r.cp_size if r.cp_size > 1 else 1)
        sources: list[MicroBatch | None] = list(micro_batches)
        shapes = [(b, -(-s // unit) * unit) for b, s in (m.shape for m in micro_batches)]
        if len(self.chunks) > 1:
            missing = -len(sources) % r.pp_size
            sources += [None] * missing
            shapes += [(1, unit)] * missing
        if uses_equal_shapes(self.arch, p):
            most = torch.tensor([max(b for b, _ in shapes), max(s for _, s in shapes)])
            dist.all_reduce(most, dist.ReduceOp.MAX, group=r.control_group)
            shapes = [(int(most[0]), int(most[1]))] * len(shapes)
        works = []
        for i, (source, (rows, length)) in enumerate(zip(sources, shapes)):
            tokens = torch.zeros(rows, length, dtype=torch.int64, device=r.device)
            labels = torch.zeros_like(tokens)
            real = torch.zeros_like(tokens, dtype=torch.bool)
            routing = None if source is None else source.routing
            if source is not None:
                b, s = source.shape
                tokens[:b, :s], labels[:b, :s] = source.tokens, source.labels
                real[:b, :s] = source.real
                if isinstance(routing, Tensor):
                    whole = routing.new_full((rows, length, *routing.shape[2:]), -1)
                    whole[:b, :s] = routing
                    routing = whole
            if r.cp_size > 1:
                held = held_positions(length, r.cp_rank, r.cp_size).to(r.device)
                tokens, labels, real = tokens[:, held], labels[:, held], real[:, held]
                routing = routing[:, held] if isinstance(routing, Tensor) else routing
            works.append(Work(i, source, tokens, labels, real, routing))
        return works

    def _run(
        self, works: list[Work], head: Callable[[Work, Tensor], tuple[Tensor, Metrics]], forward_only: bool
    ) -> list[Metrics]:
        """Megatron's schedule over all micro-batches. `head` turns what the last stage returns into a loss and metrics;
        returned are the metrics of the micro-batches on the last stage, and nothing elsewhere."""

        def loss_of(work: Work, raw: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            loss, metrics = head(work, raw)
            # The second number would be the tokens to divide by; nothing is divided (see _finalize).
            return loss, torch.ones([], dtype=torch.int, device=loss.device), metrics

        def forward_step(works: Iterator[Work], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            work = next(works)
            b, s = work.tokens.shape
            positions = torch.arange(s, device=work.tokens.device).expand(b, s)
            if self._routing is None:
                return model(work.tokens, positions, None), partial(loss_of, work)
            chunk: Any = model.module
            self._routing.begin(chunk, work)
            output = model(work.tokens, positions, None)
            self._routing.end(chunk, work)
            return output, partial(loss_of, work)

        chunks = len(self._ddp)
        with megatron_calls():
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(works) for _ in range(chunks)] if chunks > 1 else iter(works),
                model=self._ddp if chunks > 1 else self._ddp[0],
                num_microbatches=len(works),
                seq_length=works[0].tokens.shape[1] * self.runtime.cp_size,
                micro_batch_size=works[0].tokens.shape[0],
                forward_only=forward_only,
                **schedule_arguments(self._model_config),
            )
        return results if self._is_last_stage else []

    # ------------------------------------------------------------------------------------------------------- training

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], outputs: Outputs, loss_fn: Callable[..., tuple[Tensor, Metrics]]
    ) -> dict[str, float]:
        """The gradient of the total of `loss_fn(*outputs, micro_batch)`, left in Megatron's gradient buffers
        (`main_grad` of each parameter). Returns the sums of the metrics and ROLE/loss, the same on all ranks."""
        name = f"{self.role}/loss"

        def head(work: Work, raw: Tensor) -> tuple[Tensor, Metrics]:
            values = outputs(work, raw)
            if work.source is None:
                return (values[0] * 0).sum(), {}
            loss, metrics = loss_fn(*values, work.source)
            return loss, {**metrics, name: loss.detach()}

        with megatron_calls():
            for ddp in self._ddp:
                ddp.train()
                ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
        if self._routing is not None:
            self._routing.start_update(sum(int(batch.real.any(1).sum()) for batch in micro_batches))
        metrics = self._sum_metrics(self._run(self._prepare(micro_batches), head, forward_only=False))
        if self._routing is not None and self.role == "actor":
            metrics |= self._routing.metrics()
        if not math.isfinite(metrics[name]):
            raise TrainingError(
                f"the loss of optimizer step {self.updates}{self._of} is {metrics[name]}; the weights are unchanged"
            )
        return metrics

    @property
    def _of(self) -> str:
        """For errors: nothing for the actor, whose optimizer steps are meant where nothing is said."""
        return "" if self.role == "actor" else f" of the {self.role}"

    def _sum_metrics(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        """Add up over micro-batches and data-parallel ranks; the same result on all ranks."""
        r = self.runtime
        sums: dict[str, float] = {}
        for part in parts:
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        # The last rank is on the last stage and knows the names. Tensor and context ranks hold copies: one of each
        # counts.
        names = r.broadcast_object(sorted(sums), src=r.world_size - 1)
        counts = self._is_last_stage and r.tp_rank == 0 and r.cp_rank == 0
        return dict(zip(names, r.reduce_sum([sums[name] if counts else 0.0 for name in names])))

    def apply_gradients(self) -> dict[str, float]:
        """Clip, set the learning rate of this update, step. The norm is taken over all parameters of the model."""
        optimizer = self.optimizer
        lr = learning_rate(self.optimizer_options, self.updates, self._updates_per_step, self.config.run.train_iters)
        with megatron_calls():
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            if not math.isfinite(norm):
                raise TrainingError(
                    f"the gradient norm of optimizer step {self.updates}{self._of} is {norm}; the weights are unchanged"
                )
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
            limit = self.optimizer_options.clip_grad
            for part in optimizer.chained_optimizers:
                parameters = [] if part.is_stub_optimizer else part.get_parameters()
                if limit > 0 and parameters:
                    clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
            optimizer.step_with_ready_grads()
            if self.config.parallel.overlap_param_gather:
                for ddp in self._ddp:  # others read the parameters next, not only the forward pass
                    ddp.start_param_sync(force_sync=True)
        self.updates += 1
        return {f"{self.role}/grad_norm": norm, f"{self.role}/lr": lr}

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self, path: str | Path, extra_state: dict[str, Any], files: Mapping[str, bytes] | None = None
    ) -> None:
        """Write model, optimizer, schedule and generators; see `checkpoint`."""
        from rhymemeg.parallel.checkpoint import save

        save(self, Path(path), extra_state, files)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, on this or another layout. Returns the extra state."""
        from rhymemeg.parallel.checkpoint import load

        return load(self, Path(path))


def _finalize(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over data-parallel ranks, tied embeddings and sequence-parallel norms,
    without its division by a number of tokens."""
    finalize_model_grads(model, None, **kwargs)
