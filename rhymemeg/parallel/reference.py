"""The reference model of the KL term: a second set of weights in host memory, lent to the actor's modules for a forward
pass. No second model is built, so it costs no device memory and works for every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class ReferenceWeights:
    """Remembers the values that the parameters and buffers of `chunks` have now."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._tensors = [t for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers())]
        self._values = [t.detach().to("cpu", copy=True) for t in self._tensors]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the modules compute with the remembered values; afterwards with their own again, bit for bit.
        For forward passes only: the optimizer must not step inside."""
        with torch.no_grad():
            own = [t.detach().to("cpu", copy=True) for t in self._tensors]
            self._write(self._values)
        try:
            yield
        finally:
            with torch.no_grad():
                self._write(own)

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.data.copy_(value)
