"""Process groups and device of one rank.

`init_runtime` starts torch.distributed (from torchrun's environment, or as a single process without it), the groups of
Megatron's layout and the random generators, and returns a `Runtime`: plain numbers, the device and the *control
group*, a Gloo group of all ranks for Python objects, which works the same on CPU and GPU. The device is chosen here,
once: NCCL on CUDA, Gloo (and `cpu_backend`) on the CPU.

No wait lasts longer than `--distributed-timeout-minutes`; `Runtime.barrier` names the ranks that did not come.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rhymemeg.config import ParallelOptions, RunOptions
from rhymemeg.errors import ConfigError, TrainingError
from rhymemeg.parallel import cpu_backend
from rhymemeg.parallel.layout_checks import check_world_size


def choose_device_type(device: str) -> str:
    """The device type, "cuda" or "cpu", for the option `--device`."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device (driver missing, or a CPU build of torch)")
    return "cuda"


def have_transformer_engine() -> bool:
    """Whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def have_nvidia_apex() -> bool:
    """Whether NVIDIA's apex with its CUDA extensions is installed. The registry's package called `apex` is another
    project, so NVIDIA's is recognised by the extension that only it builds."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


@dataclass
class Runtime:
    """See the module. `dp_rank_of[r]` is the data-parallel rank of global rank r."""

    rank: int
    world_size: int
    local_rank: int
    device_type: str
    device: torch.device
    backend: str
    control_group: dist.ProcessGroup
    timeout: timedelta
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    edp_rank: int = 0
    edp_size: int = 1
    dp_rank_of: list[int] = field(default_factory=list)

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def barrier(self, what: str) -> None:
        """Wait for all ranks. `what` says what for; the error of a time-out names the ranks that are missing."""
        try:
            dist.monitored_barrier(self.control_group, timeout=self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise TrainingError(
                f"rank {self.rank} waited {self.timeout.total_seconds():.0f} s for all ranks ({what}): "
                f"{str(error).splitlines()[0]}"
            ) from error

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everyone's value, in rank order."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control_group)
        return gathered

    def gather_object(self, value: Any, dst: int = 0) -> list[Any] | None:
        """Everyone's value in rank order on rank `dst`, None on the others."""
        gathered: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(value, gathered, dst=dst, group=self.control_group)
        return gathered

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s value."""
        box = [value]
        dist.broadcast_object_list(box, src=src, group=self.control_group)
        return box[0]

    def reduce_max(self, value: float) -> float:
        """Largest value of any rank."""
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control_group)
        return float(box)

    def reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all ranks."""
        box = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(box, group=self.control_group)
        return box.tolist()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def init_runtime(run: RunOptions, parallel: ParallelOptions, seed: int) -> Runtime:
    """Start everything. Refuses a number of ranks that the layout does not divide, before any rank waits for
    another."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    check_world_size(parallel, world_size)
    device_type = choose_device_type(run.device)
    timeout = timedelta(minutes=run.distributed_timeout_minutes)
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        cpu_backend.install()
    _quiet()
    # Torchrun keeps its store when it restarts the ranks (--max-restarts), and with it the addresses of ranks that are gone.
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    attempt = dist.PrefixStore(f"rhymemeg/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    device_id = device if device_type == "cuda" else None
    dist.init_process_group(
        backend, store=attempt, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )
    control_group = dist.new_group(backend="gloo", timeout=timeout)
    assert control_group is not None
    runtime = Runtime(rank, world_size, local_rank, device_type, device, backend, control_group, timeout)
    start_layout(runtime, parallel, seed)
    return runtime


def _quiet() -> None:
    """Silence what megatron-core 0.16.1 says about itself on current torch, once a rank and call site: not for the
    user."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    for module in (r"torch\.distributed\.", r"megatron\.core\."):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)


def start_layout(runtime: Runtime, parallel: ParallelOptions, seed: int) -> None:
    """Create Megatron's groups for `parallel` (replacing those of an earlier layout) and seed the generators."""
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel

    with cpu_backend.megatron_calls():
        if ps.model_parallel_is_initialized():
            ps.destroy_model_parallel()
        ps.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            # The number only matters to Megatron's deprecated queries; the actor passes each chunk's stage explicitly.
            virtual_pipeline_model_parallel_size=None,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, round(runtime.timeout.total_seconds() / 60)),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        runtime.tp_rank = ps.get_tensor_model_parallel_rank()
        runtime.tp_size = ps.get_tensor_model_parallel_world_size()
        runtime.pp_rank = ps.get_pipeline_model_parallel_rank()
        runtime.pp_size = ps.get_pipeline_model_parallel_world_size()
        runtime.dp_rank, runtime.dp_size = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        runtime.cp_rank, runtime.cp_size = ps.get_context_parallel_rank(), ps.get_context_parallel_world_size()
        runtime.ep_rank = ps.get_expert_model_parallel_rank()
        runtime.ep_size = ps.get_expert_model_parallel_world_size()
        runtime.etp_rank = ps.get_expert_tensor_parallel_rank()
        runtime.etp_size = ps.get_expert_tensor_parallel_world_size()
        runtime.edp_rank = ps.get_expert_data_parallel_rank()
        runtime.edp_size = ps.get_expert_data_parallel_world_size()
    t, c, d = runtime.tp_size, runtime.cp_size, runtime.dp_size
    runtime.dp_rank_of = [r // (t * c) % d for r in range(runtime.world_size)]


def shutdown() -> None:
    """Destroy the groups. Safe to call twice."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state as ps

    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    dist.destroy_process_group()
