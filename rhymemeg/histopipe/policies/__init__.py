"""The four policies behind one interface: `place(PlaceInput) -> PlaceOutput`, pure.

random       even split in random order, as veRL does; the baseline
paper        ranking groups and engines per group of HistoPipe (arXiv 2508.18588, section on two-tier scheduling)
complement   longest first on the engine that is free earliest, counting what it still carries; the default
pull         one queue, longest first, for all engines
"""

from __future__ import annotations

from collections.abc import Callable

from rhymemeg.histopipe.policies import complement, paper, pull, random
from rhymemeg.histopipe.policies.base import PlaceInput, PlaceOutput

POLICIES: dict[str, Callable[[PlaceInput], PlaceOutput]] = {
    "random": random.place,
    "paper": paper.place,
    "complement": complement.place,
    "pull": pull.place,
}

__all__ = ["POLICIES", "PlaceInput", "PlaceOutput"]
