"""Megatron-core 0.16.1 without CUDA.

Megatron names CUDA devices all over its code (`device="cuda"`, `torch.cuda.current_device()`, streams, RNG states).
What is replaced here, and how far each replacement reaches:

1. **Names inside Megatron's modules.** `install()` rebinds the global name `torch` (and `torch.cuda`,
   `torch.distributed`)
   of every `megatron.core` module to a *view*: a module object with the contents of the real one and a few functions
   exchanged. Code outside Megatron keeps the real `torch`, in any thread and in autograd's backward too, so a rollout
   engine in the same process pays nothing (`tools/bench_cpu_backend.py` measures it).
2. **Two tensor methods**, `Tensor.cuda` and `Tensor.type`, are called on objects and cannot be reached that way.
   `megatron_calls()` exchanges them for the time of a call into Megatron: `.cuda()` is the tensor itself and `.type()`
   says `torch.cuda.FloatTensor`, which the optimizers compare with.
3. **A handful of Megatron's own functions** that reach the CUDA generators through torch internals.

Every name here that depends on the version of megatron-core is in this module. Nothing is done on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

# Modules that the actor uses; imported by `install` so that their names can be rebound before anything runs.
MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
)

# torch functions that take `device=` and that Megatron calls with a CUDA device.
FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "tensor", "zeros", "zeros_like"),
)

_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}

_views: dict[int, types.ModuleType] = {}
_modules_seen = 0
_depth = 0
_lock = threading.RLock()


class _NoStream:
    """A stream or event of a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: object = None) -> _NoStream:
        return self


def _not_cuda(device: Any) -> Any:
    """The CPU in place of a CUDA device (a name, an index or a `torch.device`), anything else unchanged."""
    if device is None or isinstance(device, bool):
        return device
    if isinstance(device, int):
        return CPU
    return CPU if str(device).startswith("cuda") else device


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, device=_not_cuda(device), **kwargs)

    return call


def _view(module: types.ModuleType, **exchanged: Any) -> types.ModuleType:
    """A module object that answers like `module` except for the exchanged names."""
    view = types.ModuleType(module.__name__, module.__doc__)
    vars(view).update(vars(module))
    vars(view).update(exchanged)
    vars(view)["__getattr__"] = functools.partial(getattr, module)  # names that the module makes lazily
    return view


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gloo wants lists of split sizes where NCCL also takes tensors."""

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    return dist.all_to_all_single(
        output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op
    )


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gloo gathers equal sizes only; the expert dispatcher gathers as many tokens as each rank happens to have."""
    if all(out.shape == tensor.shape for out in outputs):
        return dist.all_gather(outputs, tensor, group, async_op)
    most = max(out.shape[0] for out in outputs)
    padded = tensor.new_zeros(most, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(parts, padded, group)
    for out, part in zip(outputs, parts):
        out.copy_(part[: out.shape[0]])
    return None


def _reduce_scatter(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Likewise for its inverse."""
    whole = torch.cat(inputs)
    dist.all_reduce(whole, op, group)
    output.copy_(whole.split([part.shape[0] for part in inputs])[dist.get_rank(group)])


def _make_views() -> None:
    cuda = _view(
        torch.cuda,
        current_device=lambda: CPU,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        current_stream=_NoStream,
        default_stream=_NoStream,
        Stream=_NoStream,
        Event=_NoStream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    distributed = _view(
        dist, all_to_all_single=_all_to_all_single, all_gather=_all_gather, reduce_scatter=_reduce_scatter
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    _views[id(torch)] = _view(torch, cuda=cuda, distributed=distributed, **factories)
    _views[id(torch.cuda)] = cuda
    _views[id(dist)] = distributed


def _rebind() -> None:
    """Give every megatron.core module that has been imported since the last call the views."""
    global _modules_seen
    if len(sys.modules) == _modules_seen:
        return
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) and id(value) in _views:
                setattr(module, key, _views[id(value)])
    _modules_seen = len(sys.modules)


def install() -> None:
    """Import the parts of Megatron that the actor uses and make them run on the CPU. Idempotent; CPU runs only."""
    with _lock:
        if _views:
            return
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Apex is not installed" and the like: not needed here
            from megatron.core import jit

            jit.disable_jit_fuser()  # its torch.compile would build C++ kernels for a few element-wise functions
            for name in MODULES:
                importlib.import_module(name)
        _make_views()
        _rebind()

        from megatron.core.tensor_parallel import random as mcore_random
        from megatron.core.transformer.moe import moe_utils

        mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        # "CPU RNG state changed within GPU RNG context" is what is wanted here.
        logging.getLogger(mcore_random.__name__).setLevel(logging.ERROR)
        if not hasattr(moe_utils, "te_general_gemm"):  # left undefined without Transformer Engine
            moe_utils.te_general_gemm = None


def current_device() -> torch.device:
    """Where Megatron puts tensors in this process: the CPU after `install`, else the current GPU."""
    return CPU if _views else torch.device("cuda", torch.cuda.current_device())


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs and tensor.dtype in _TYPE_NAMES:
        return _TYPE_NAMES[tensor.dtype]
    return torch._C.TensorBase.type(tensor, *args, **kwargs)


def _cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def megatron_calls() -> Iterator[None]:
    """Around calls into Megatron. Does nothing unless `install` was called. May be nested."""
    global _depth
    if not _views:
        yield
        return
    with _lock:
        _rebind()
        _depth += 1
        if _depth == 1:
            # Both are inherited from torch._C.TensorBase; an attribute on the subclass hides them until deleted.
            torch.Tensor.type = _type  # type: ignore[method-assign,assignment]
            torch.Tensor.cuda = _cuda  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                del torch.Tensor.type, torch.Tensor.cuda
