"""The engine's side of weight movement: where vLLM keeps a Hugging Face slice, and how to read it before it is packed.

vLLM fuses tensors (query, key and value; gate and up; all experts of a layer) into parameters, and after loading a
layer may pack or quantise them, on CPU into a form that cannot be read back. `reading(model, slots, found)` therefore
looks at each layer in between: it wraps `process_weights_after_loading` of the layers' quantisation methods while a reload runs,
and reads layers without one (norms) when it is over. What it computes are the checksums of `checksum.py`, so what is
compared with the actor is what the engine's own loader has put into the engine's own parameters.

Written for vLLM 0.32: relies on `quant_method.process_weights_after_loading(layer)` being called once a layer is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rhymemeg.weight_sync.boxes import Box, Shape, shape_of
from rhymemeg.weight_sync.checksum import checksum
from rhymemeg.weight_sync.moves import Tensor


class Slot(NamedTuple):
    """Where the engine keeps one box of a Hugging Face tensor: `parameter[at]`, of the box's shape."""

    name: str
    shape: Shape
    box: Box
    at: tuple[int | slice, ...]


Slots = dict[str, list[Slot]]
"""Name of an engine's parameter -> what it holds."""


def engine_slots(needed: Iterable[tuple[Tensor, Box]]) -> Slots:
    """Slots of one rank from the boxes that it needs, parts of a rule in their order. These follow each other in their
    engine parameter; experts lie there in the order of their indices."""
    slots: Slots = defaultdict(list)
    rows: dict[tuple[str, str], int] = defaultdict(int)  # filled so far by one Megatron parameter
    experts: dict[str, dict[int, int]] = defaultdict(dict)
    listed = list(needed)
    for tensor, _ in listed:
        p = tensor.parameter
        if p.expert is not None:
            experts[p.engine_name(tensor.part)].setdefault(p.expert, 0)
    for numbers in experts.values():
        for place, expert in enumerate(sorted(numbers)):
            numbers[expert] = place
    for tensor, box in listed:
        p = tensor.parameter
        parameter = p.engine_name(tensor.part)
        start = rows[parameter, p.name]
        stop = rows[parameter, p.name] = start + shape_of(box)[0]
        index: tuple[int | slice, ...] = (slice(start, stop),)
        if p.expert is not None:
            index = (experts[parameter][p.expert], *index)
        slots[parameter].append(Slot(tensor.name, tensor.shape, box, index))
    return slots


@contextmanager
def reading(model: torch.nn.Module, slots: Slots, found: dict[str, torch.Tensor]) -> Iterator[None]:
    """While a reload runs: note in `found` the checksum of each slot's content before packing. A slot whose parameter
    the engine does not have, or whose layer it does not process, is not noted."""
    by_module: dict[str, list[tuple[str, list[Slot]]]] = defaultdict(list)
    for parameter, listed in slots.items():
        path, _, attribute = parameter.rpartition(".")
        by_module[path].append((attribute, listed))
    wanted = {id(m): by_module[name] for name, m in model.named_modules() if name in by_module}

    def read(layer: torch.nn.Module) -> None:
        for attribute, listed in wanted.get(id(layer), ()):
            parameter = getattr(layer, attribute, None)
            if parameter is not None:
                for slot in listed:
                    found[slot.name] = checksum(parameter.data[slot.at], slot.box, slot.shape)

    wrapped: list[Any] = []
    unwrapped: list[torch.nn.Module] = []
    for module in model.modules():
        if id(module) in wanted:
            method = getattr(module, "quant_method", None)
            if method is None:
                unwrapped.append(module)
            elif "process_weights_after_loading" not in vars(method):
                method.process_weights_after_loading = _read_first(method.process_weights_after_loading, read)
                wrapped.append(method)
    try:
        yield
        for module in unwrapped:
            read(module)
    finally:
        for method in wrapped:
            del method.process_weights_after_loading


def _read_first(
    process: Callable[[torch.nn.Module], None], read: Callable[[torch.nn.Module], None]
) -> Callable[[torch.nn.Module], None]:
    def process_weights_after_loading(layer: torch.nn.Module) -> None:
        read(layer)
        process(layer)

    return process_weights_after_loading
