"""`pull`: no placement. One queue, longest first; an engine with a free slot takes the first sample. The upper
reference: it needs a queue that all engines reach at every step and drafts that any engine can fetch at once."""

from __future__ import annotations

import numpy as np

from rhymemeg.histopipe.plan import Queue
from rhymemeg.histopipe.policies.base import PlaceInput, PlaceOutput, in_prompt_order, longest_first


def place(given: PlaceInput) -> PlaceOutput:
    """The whole step in one part."""
    row, sample, _ = in_prompt_order(given, longest_first(given))
    return PlaceOutput(Queue(np.array([0, len(row)], np.int64), row, sample), shared=True)
