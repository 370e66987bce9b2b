"""Whether a layout fits, and what it looks like. Pure: plain data in, plain data out, no torch.

`check_layout(arch, parallel, world_size, device_type)` refuses (`ConfigError`, naming the option) what Megatron
cannot run. `describe_layout(arch, parallel, world_size)` says for each rank where it sits and which layers it holds.

Order of ranks: tensor parallel fastest, then context, data, pipeline. With T = TP, C = CP, D = DP,

    rank = tp + T (cp + C (dp + D pp))           and, for the experts of a MoE model, with T' = expert TP and D' =
    expert DP, rank = etp + T' (ep + EP (edp + D' pp)).

A virtual stage is a run of consecutive layers; with virtual pipelining, virtual stage v of pipeline rank p is the
(v PP + p)-th run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rhymemeg.arch import ModelArch
from rhymemeg.config import ParallelOptions
from rhymemeg.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where one rank sits. `layers[v]` are the global layers (from 0) of its virtual stage v."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    layers: tuple[range, ...]


@dataclass(frozen=True)
class Layout:
    """Sizes of all dimensions. `stages[p][v]` are the layers of virtual stage v of pipeline rank p."""

    world_size: int
    tp: int
    cp: int
    dp: int
    pp: int
    vpp: int
    etp: int
    ep: int
    edp: int
    stages: tuple[tuple[range, ...], ...]

    def place(self, rank: int) -> Place:
        """Coordinates and layers of one rank."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        return Place(rank, tp, cp, dp, pp, etp, ep, rest % self.edp, self.stages[pp])

    def places(self) -> Iterator[Place]:
        """All ranks in order."""
        return (self.place(rank) for rank in range(self.world_size))

    @property
    def dp_rank_of(self) -> list[int]:
        """Data-parallel rank of each rank."""
        return [place.dp for place in self.places()]


def virtual_stages(arch: ModelArch, parallel: ParallelOptions) -> int:
    """Virtual stages a pipeline rank holds; 1 without virtual pipelining."""
    n, pp = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    return 1 if n is None else arch.num_layers // (pp * n)


def stage_layers(arch: ModelArch, parallel: ParallelOptions) -> tuple[tuple[range, ...], ...]:
    """[pipeline rank][virtual stage] -> global layers. Expects a layout that `check_layout` accepts."""
    pp, layers, vpp = parallel.pipeline_model_parallel_size, arch.num_layers, virtual_stages(arch, parallel)
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        n = layers // (pp * vpp)
        return tuple(tuple(range((v * pp + p) * n, (v * pp + p + 1) * n) for v in range(vpp)) for p in range(pp))
    given = (first or 0) + (last or 0)
    between = pp - (first is not None) - (last is not None)
    counts = [(layers - given) // between] * between if between else []
    counts = ([first] if first is not None else []) + counts + ([last] if last is not None else [])
    starts = [sum(counts[:p]) for p in range(pp)]
    return tuple((range(start, start + count),) for start, count in zip(starts, counts))


def describe_layout(arch: ModelArch, parallel: ParallelOptions, world_size: int) -> Layout:
    """The layout of a run on `world_size` ranks. Expects one that `check_layout` accepts."""
    tp, pp, cp = _sizes(parallel)
    etp, ep = parallel.expert_tensor_parallel_size or tp, parallel.expert_model_parallel_size
    return Layout(
        world_size=world_size,
        tp=tp,
        cp=cp,
        dp=world_size // (tp * pp * cp),
        pp=pp,
        vpp=virtual_stages(arch, parallel),
        etp=etp,
        ep=ep,
        edp=world_size // (etp * ep * pp),
        stages=stage_layers(arch, parallel),
    )


def _sizes(parallel: ParallelOptions) -> tuple[int, int, int]:
    return (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )


def check_world_size(parallel: ParallelOptions, world_size: int) -> None:
    """Refuse a number of ranks that the layout does not divide."""
    tp, pp, cp = _sizes(parallel)
    if world_size % (tp * pp * cp):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}"
            + (f" x --context-parallel-size {cp}" if cp > 1 else "")
            + f" = {tp * pp * cp} does not divide the number of ranks, {world_size}"
        )
    etp, ep = parallel.expert_tensor_parallel_size or tp, parallel.expert_model_parallel_size
    if world_size % (etp * ep * pp):
        raise ConfigError(
            f"--expert-model-parallel-size {ep} x expert tensor parallel {etp} x --pipeline-model-parallel-size {pp} = "
            f"{etp * ep * pp} does not divide the number of ranks, {world_size}"
        )


def check_layout(arch: ModelArch, parallel: ParallelOptions, world_size: int, device_type: str) -> None:
    """Refuse a layout that does not fit the model, the number of ranks or the device ("cuda" or "cpu")."""
    check_world_size(parallel, world_size)
    _check_device(parallel, device_type)
    _check_tensor_parallel(arch, parallel)
    _check_pipeline(arch, parallel)
    _check_experts(arch, parallel)


def _check_device(parallel: ParallelOptions, device_type: str) -> None:
    if parallel.overlap_param_gather and not (parallel.overlap_grad_reduce and parallel.use_distributed_optimizer):
        raise ConfigError("--overlap-param-gather needs --overlap-grad-reduce and --use-distributed-optimizer")
    if device_type != "cpu":
        return
    if parallel.context_parallel_size > 1:
        raise ConfigError(
            f"--context-parallel-size {parallel.context_parallel_size} needs a GPU: the only attention that "
            "has it is Transformer Engine's"
        )
    for name in ("moe_grouped_gemm", "overlap_grad_reduce", "overlap_param_gather"):
        if getattr(parallel, name):
            reason = "CUDA streams" if name.startswith("overlap") else "Transformer Engine"
            raise ConfigError(f"--{name.replace('_', '-')} needs a GPU: it is made of {reason}")


def _check_tensor_parallel(arch: ModelArch, parallel: ParallelOptions) -> None:
    tp = parallel.tensor_model_parallel_size
    for what, size in (
        ("attention heads", arch.num_attention_heads),
        ("key-value heads", arch.num_key_value_heads),
        ("columns of the MLP (intermediate_size)", arch.intermediate_size),
    ):
        if size % tp:
            raise ConfigError(f"--tensor-model-parallel-size {tp} does not divide the model's {size} {what}")
    if parallel.sequence_parallel and tp == 1:
        raise ConfigError(
            "--sequence-parallel splits over the tensor-parallel ranks: --tensor-model-parallel-size must be > 1"
        )


def _check_pipeline(arch: ModelArch, parallel: ParallelOptions) -> None:
    pp, layers = parallel.pipeline_model_parallel_size, arch.num_layers
    n = parallel.num_layers_per_virtual_pipeline_stage
    uneven = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    given = {name: value for name, value in uneven.items() if value is not None}
    if n is not None:
        if pp == 1:
            raise ConfigError(f"--num-layers-per-virtual-pipeline-stage {n} needs --pipeline-model-parallel-size > 1")
        if given:
            raise ConfigError(f"--num-layers-per-virtual-pipeline-stage cannot be combined with {next(iter(given))}")
        if layers % (pp * n):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {n} x --pipeline-model-parallel-size {pp} = {pp * n} does "
                f"not divide the model's {layers} layers"
            )
        if layers == pp * n:
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {n}: with {layers} layers on {pp} stages there is only one "
                "virtual stage a rank; leave the option out or make it smaller"
            )
    if not given:
        if layers % pp:
            raise ConfigError(
                f"--pipeline-model-parallel-size {pp} does not divide the model's {layers} layers (uneven stages: "
                "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers)"
            )
        return
    shown = " ".join(f"{name} {value}" for name, value in given.items())
    between, left = pp - len(given), layers - sum(given.values())
    if pp == 1:
        raise ConfigError(f"{shown} needs --pipeline-model-parallel-size > 1")
    if between < 0 or left < between or (between == 0 and left) or (between and left % between):
        raise ConfigError(
            f"{shown} leaves {left} of {layers} layers for the other {max(between, 0)} of "
            f"--pipeline-model-parallel-size {pp} stages, which they cannot share evenly"
        )


def _check_experts(arch: ModelArch, parallel: ParallelOptions) -> None:
    tp, ep, etp = (
        parallel.tensor_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    if not arch.is_moe:
        for name, value, off in (
            ("--expert-model-parallel-size", ep, 1),
            ("--expert-tensor-parallel-size", etp, None),
        ):
            if value != off:
                raise ConfigError(f"{name} {value}: {arch.architecture} has no experts")
        return
    if arch.num_experts % ep:
        raise ConfigError(f"--expert-model-parallel-size {ep} does not divide the model's {arch.num_experts} experts")
    if arch.moe_intermediate_size % (etp or tp):
        option = "--tensor-model-parallel-size" if etp is None else "--expert-tensor-parallel-size"
        raise ConfigError(
            f"{option} {etp or tp} does not divide the columns of an expert (moe_intermediate_size = "
            f"{arch.moe_intermediate_size})"
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} with experts needs --sequence-parallel: only then do the "
            "tensor-parallel ranks route different tokens"
        )
    if arch.num_experts_per_tok == 1 and arch.norm_topk_prob:
        raise ConfigError(
            "num_experts_per_tok=1 with norm_topk_prob=true (config.json) is not supported: the router has no gradient"
        )
