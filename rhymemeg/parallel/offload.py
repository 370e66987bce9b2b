"""What of the actor's memory leaves the device while the engines generate, by `--offload-optimizer`, `--offload-gradients`.

    offload = Offload([actor, critic], config.sync)
    offload.restore()       before a training phase
    offload.release()       after it, before the engines wake

`release` frees the gradient buffers (the next step zeroes them anyway) and takes Adam's moments and the fp32 master weights
to host memory; `restore` brings both back. Each may be called any number of times. `rhymemeg.weight_sync.colocation` says
in which order this, the engine's sleep and the weight update follow, and what the peak is.

The work is Megatron's own (`_ParamAndGradBuffer.offload_to_cpu`, `MegatronOptimizer.offload_to_cpu`). With fp32 parameters
the optimizer has no master weights of its own but views of the parameters, which must stay: such a run is refused on a GPU.
On the CPU the optimizer's state is in host memory already; gradients are freed there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rhymemeg.config import SyncOptions
from rhymemeg.errors import ConfigError
from rhymemeg.parallel.cpu_backend import megatron_calls

if TYPE_CHECKING:
    from rhymemeg.parallel.trained_model import TrainedModel


class Offload:
    """See the module. `models`: the trained models of this rank."""

    def __init__(self, models: Sequence[TrainedModel], options: SyncOptions) -> None:
        wrapped: list[Any] = [module for model in models for module in model.wrapped]
        self._buffers = [buffer for module in wrapped for buffer in (*module.buffers, *module.expert_parallel_buffers)]
        self._optimizers = [model.optimizer for model in models]
        self._options = options
        self._away = False
        first = next(p for module in wrapped for p in module.parameters())
        self._cuda = first.is_cuda
        if options.offload_optimizer and self._cuda and first.dtype == torch.float32:
            raise ConfigError(
                "--offload-optimizer needs --params-dtype bf16: fp32 parameters are their own master weights"
            )

    @property
    def gradient_bytes(self) -> int:
        """Bytes that the gradient buffers have on the device now."""
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in self._buffers)

    def release(self) -> None:
        """Training is over: free what the options say."""
        if self._away:
            return
        self._away = True
        self._wait()
        if self._options.offload_gradients:
            for buffer in self._buffers:
                buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self._options.offload_optimizer:
            with megatron_calls():
                for optimizer in self._optimizers:
                    optimizer.offload_to_cpu()
        self._empty_cache()

    def restore(self) -> None:
        """Training begins: everything is on the device again, gradients zero."""
        if not self._away:
            return
        self._away = False
        if self._options.offload_optimizer:
            with megatron_calls():
                for optimizer in self._optimizers:
                    optimizer.restore_from_cpu()
        if self._options.offload_gradients:
            for buffer in self._buffers:
                buffer.reload_from_cpu(move_params=False, move_grads=True)
        self._wait()

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _empty_cache(self) -> None:
        # The engine takes its memory from the driver, not from torch's cache.
        if self._cuda:
            torch.cuda.empty_cache()
