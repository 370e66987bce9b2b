"""`random`: prompts in random order, their samples cut into equal parts, one an engine, as trainers without a plan do.

The order is drawn from (seed, step, prompt id) alone. Samples of one prompt stay together except where a part ends, so
that fewer prompts than engines are split too.
"""

from __future__ import annotations

import numpy as np

from rhymemeg.histopipe.plan import Queue
from rhymemeg.histopipe.policies.base import PlaceInput, PlaceOutput, in_prompt_order, splitmix64


def place(given: PlaceInput) -> PlaceOutput:
    """Parts differ by at most one sample."""
    keys = splitmix64(given.prompt_ids, given.seed, given.step)
    row, sample, _ = in_prompt_order(given, np.argsort(keys, kind="stable"))
    offsets = np.arange(given.num_engines + 1, dtype=np.int64) * len(row) // given.num_engines
    return PlaceOutput(Queue(offsets, row, sample))
