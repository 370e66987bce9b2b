"""The critic of PPO: the value of every state that the actor was in.

    critic = Critic(config, arch, runtime)
    critic.load_weights(folder)                                # the trunk from Hugging Face safetensors, the head is zero
    critic.values(micro_batches)                               # -> [b, s] a micro-batch, on every rank
    critic.train_step(micro_batches, objective)                # one optimizer step -> metrics

The model is the actor's, with a linear head to one number in place of the output layer; layout, schedule, optimizer and
checkpoints are those of `trained_model`. Position t of a row holds V(tokens 0..t), the value of the state in which the
label of position t is sampled, so values lie where log-probabilities and advantages of the same tokens do.

`objective(values [b, s], micro_batch) -> (loss, metrics)` returns sums, as the actor's loss does
(`rhymemeg.rl.values.ValueObjective`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.parallel.cpu_backend import current_device
from rhymemeg.parallel.model import ActorModel
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.parallel.trained_model import TrainedModel, Work
from rhymemeg.rl.batching import MicroBatch

ValueFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class ValueHead(torch.nn.Module):
    """v = w . h, in fp32, [s, b, hidden] -> [s, b]. The same on all tensor-parallel ranks; under sequence parallelism
    each takes its part of the tokens, and the values are gathered."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device())
        )
        # Megatron sums the gradients of marked weights over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # What follows is computed on all ranks alike, so each takes its part of the gradient back.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values.squeeze(-1)


class ValueModel(ActorModel):
    """The actor's model whose last stage returns values [s, b]."""

    has_logits = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config)

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """For checkpoints; GPT's own asks for an output layer."""
        return MegatronModule.sharded_state_dict(self, *arguments, **options)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.value_head(hidden_states) if self.post_process else hidden_states


class Critic(TrainedModel):
    """See the module."""

    role = "critic"

    def __init__(self, config: Config, arch: ModelArch, runtime: Runtime) -> None:
        lr = config.critic.critic_lr
        # The schedule has the shape of the actor's, at its own height.
        scale = lr / config.optimizer.lr
        options = config.optimizer.model_copy(update={"lr": lr, "min_lr": config.optimizer.min_lr * scale})
        super().__init__(config, arch, runtime, options, ValueModel)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """V of every position, fp32 [b, s] for each micro-batch, on all ranks of this data-parallel index. Values at
        padding mean nothing. No gradient."""
        return [values for (values,) in self.evaluate(micro_batches, _outputs, count=1)]

    def train_step(self, micro_batches: Sequence[MicroBatch], objective: ValueFunction) -> dict[str, float]:
        """Forward, backward, one optimizer step. Returns the sums of the metrics and critic/loss, critic/grad_norm,
        critic/lr, the same on all ranks. A loss or gradient that is not finite raises TrainingError on all ranks, and
        the weights stay as they are."""
        return self.backward(micro_batches, objective) | self.apply_gradients()

    def backward(self, micro_batches: Sequence[MicroBatch], objective: ValueFunction) -> dict[str, float]:
        """The gradient of the total loss, left in Megatron's gradient buffers. Returns the sums of the metrics."""
        return self.accumulate(micro_batches, _outputs, objective)


def _outputs(work: Work, values: Tensor) -> tuple[Tensor, ...]:
    return (work.rows(values),)
