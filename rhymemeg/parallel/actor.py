"""The model that is trained: log-probabilities, optimizer steps, checkpoints, on whatever layout the run has.

    actor = Actor(config, arch, runtime)
    actor.load_weights(folder)                                        # Hugging Face safetensors
    actor.log_probs(micro_batches, temperature)                       # -> [b, s] a micro-batch, on every rank
    actor.train_step(micro_batches, loss_fn, temperature)             # one optimizer step -> metrics
    actor.save_checkpoint(path, extra_state); actor.load_checkpoint(path)

Every method is called by all ranks; see `trained_model`, which it shares with the critic.

`loss_fn(log_probs [b, s], entropy [b, s] or None, micro_batch) -> (loss, metrics)` returns scalars that are *sums*:
the step minimises the total of `loss` over all micro-batches and data-parallel ranks, whatever their number, and
metrics are added up likewise. If `loss_fn.needs_entropy` is False, it gets None for the entropy. On a pipeline, only
the last stage calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state as ps
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.parallel.trained_model import Outputs, TrainedModel, Work
from rhymemeg.parallel.vocab_parallel import log_probs_and_entropy
from rhymemeg.rl.batching import MicroBatch

LossFunction = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class Actor(TrainedModel):
    """See the module."""

    role = "actor"

    def __init__(self, config: Config, arch: ModelArch, runtime: Runtime) -> None:
        super().__init__(config, arch, runtime, config.optimizer)

    def log_probs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """log softmax(logits / temperature)[label], fp32 [b, s] for each micro-batch, on all ranks of this
        data-parallel index. Values at padding mean nothing. No gradient."""
        return [log_probs for log_probs, _ in self.log_probs_and_entropy(micro_batches, temperature)]

    def log_probs_and_entropy(
        self, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[tuple[Tensor, Tensor]]:
        """As `log_probs`, each with the entropy of the distribution."""
        pairs: Any = self.evaluate(micro_batches, self._outputs(temperature), count=2)
        return list(pairs)

    def _outputs(self, temperature: float, in_place: bool = False) -> Outputs:
        """Log-probability of each label and entropy, from the logits of the last stage."""

        def outputs(work: Work, logits: Tensor) -> tuple[Tensor, ...]:
            group = ps.get_tensor_model_parallel_group()
            pair = log_probs_and_entropy(
                logits, work.labels.t(), self.arch.vocab_size, temperature, group, in_place=in_place
            )
            return tuple(map(work.rows, pair))

        return outputs

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float
    ) -> dict[str, float]:
        """Forward, backward, one optimizer step. Returns the sums of the metrics and actor/loss, actor/grad_norm,
        actor/lr, the same on all ranks. A loss or gradient that is not finite raises TrainingError on all ranks, and
        the weights stay as they are."""
        return self.backward(micro_batches, loss_fn, temperature) | self.apply_gradients()

    def backward(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float
    ) -> dict[str, float]:
        """The gradient of the total loss, left in Megatron's gradient buffers (`main_grad` of each parameter). Returns
        the sums of the metrics and actor/loss."""
        wants_entropy = getattr(loss_fn, "needs_entropy", True)

        def loss_of(log_probs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return loss_fn(log_probs, entropy if wants_entropy else None, batch)

        return self.accumulate(micro_batches, self._outputs(temperature, in_place=True), loss_of)
