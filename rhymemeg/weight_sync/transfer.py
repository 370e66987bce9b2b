"""Carries out a plan: slices move from the actor's shards to where they are needed, bucket by bucket.

`Courier(plan, rank, group, ...)` prepares a rank's messages once. `deliver(held)` then yields, in the plan's order,
every tensor of the model as `(Tensor, box, data)`: the box that this rank needs and its values, or None twice if it
needs nothing of it. All ranks of the group must iterate it to its end together.

Transport is grouped point-to-point over the given process group (NCCL or Gloo), one message a pair of ranks, bucket and
hop. Within a bucket the first hop comes from the actor's shards, the second from ranks that got it with the first.
What a rank holds already does not travel: if one shard holds the whole box, `data` is a view of the parameter itself.
The next bucket's first hop is on its way while the consumer works on one, so at most two buckets exist (a bucket counts
what a rank receives and packs), plus what the consumer keeps: a yielded tensor's memory is never reused.

A peer that does not answer within the time-out is a WeightSyncError that names it (NCCL: the group's own watchdog).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import Box, contains, numel, shape_of, shift, slices, whole
from rhymemeg.weight_sync.layouts import ModelLayout
from rhymemeg.weight_sync.moves import BucketProgram, Plan, Tensor
from rhymemeg.weight_sync.topology import ActorLayout

ALIGNMENT = 16
"""Bytes to which each slice in a message is aligned: enough for any dtype."""

Held = dict[str, list[tuple[Box, torch.Tensor]]]
"""Hugging Face name -> the boxes of it that a rank holds, each with a view of the parameter."""


def held_views(params: dict[str, torch.Tensor], layout: ModelLayout, actor: ActorLayout, rank: int) -> Held:
    """What this rank's parameters (canonical names) are in Hugging Face's terms. No copies."""
    c = actor.ranks[rank]
    held: Held = defaultdict(list)
    for name, tensor in params.items():
        for piece in layout.pieces(name, c.tp, actor.tp, c.etp, actor.etp, actor.padded_vocab):
            held[piece.hf_name].append((piece.hf_box, tensor[slices(piece.local_box)]))
    return held


class Delivery(NamedTuple):
    tensor: Tensor
    box: Box | None
    data: torch.Tensor | None


class _Slot(NamedTuple):
    """One slice in a message: its place in bytes."""

    tensor: int
    box: Box
    start: int
    stop: int


@dataclass
class _Message:
    """The content that one or several peers get, or that comes from one peer."""

    peers: list[int]
    slots: list[_Slot]
    size: int


@dataclass
class _Prepared:
    """A bucket. Messages by hop; tensor number -> (hop, message number, slot) of what arrives for it."""

    program: BucketProgram
    send: list[list[_Message]]
    receive: list[list[_Message]]
    arriving: dict[int, list[tuple[int, int, _Slot]]]
    local: dict[int, list[Box]]


_Works = list[tuple[dist.Work, dist.P2POp]]


class Courier:
    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        timeout: timedelta,
    ) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self.device, self.dtype, self.timeout = device, dtype, timeout
        self.on_gloo = dist.get_backend(group) == "gloo"
        self._prepared = [self._prepare(program) for program in plan.program(rank)]
        self.bytes_received = sum(m.size for p in self._prepared for hop in p.receive for m in hop)
        self.bytes_sent = sum(m.size * len(m.peers) for p in self._prepared for hop in p.send for m in hop)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        return torch.float32 if tensor.part.float32 else self.dtype

    # --------------------------------------------------------------------------------------------------- preparation

    def _prepare(self, program: BucketProgram) -> _Prepared:
        send: list[list[_Message]] = []
        receive: list[list[_Message]] = []
        arriving: dict[int, list[tuple[int, int, _Slot]]] = defaultdict(list)
        for number, hop in enumerate(program.hops):
            receive.append([self._message([source], items) for source, items in sorted(hop.receive.items())])
            for index, message in enumerate(receive[-1]):
                for slot in message.slots:
                    arriving[slot.tensor].append((number, index, slot))
            same: dict[tuple[tuple[int, Box], ...], list[int]] = defaultdict(list)
            for target, items in sorted(hop.send.items()):
                same[tuple(items)].append(target)
            send.append([self._message(peers, list(items)) for items, peers in same.items()])
        local: dict[int, list[Box]] = defaultdict(list)
        for tensor, box in program.local:
            local[tensor].append(box)
        return _Prepared(program, send, receive, arriving, local)

    def _message(self, peers: list[int], items: list[tuple[int, Box]]) -> _Message:
        slots, at = [], 0
        for tensor, box in items:
            size = numel(box) * self.dtype_of(self.plan.tensors[tensor]).itemsize
            slots.append(_Slot(tensor, box, at, at + size))
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return _Message(peers, slots, at)

    # ------------------------------------------------------------------------------------------------------ transfer

    def deliver(self, held: Held) -> Iterator[Delivery]:
        """See the module. `held`: this rank's shards now (`held_views`)."""
        buffers, works = self._start(0, 0, held, []) if self._prepared else ([], [])
        for number, prepared in enumerate(self._prepared):
            self._wait(number, works)
            works = []  # lets go of what was packed
            first = buffers
            second, relayed = self._start(number, 1, held, first)
            if number + 1 < len(self._prepared):
                buffers, works = self._start(number + 1, 0, held, [])
            self._wait(number, relayed)
            relayed = []
            for tensor in prepared.program.tensors:
                box = prepared.program.needed.get(tensor)
                data = None if box is None else self._assemble(prepared, tensor, box, [first, second], held)
                yield Delivery(self.plan.tensors[tensor], box, data)

    def _start(
        self, number: int, hop: int, held: Held, arrived: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], _Works]:
        """Pack and post the messages of a bucket's hop. The second hop's are made from what `arrived` with the first.
        Returns the buffers that fill, and the work to wait for."""
        prepared = self._prepared[number]
        buffers = [torch.empty(m.size, dtype=torch.uint8, device=self.device) for m in prepared.receive[hop]]
        tag = 2 * number + hop if self.on_gloo else 0
        operations = [
            dist.P2POp(dist.irecv, buffer, m.peers[0], self.group, tag)
            for m, buffer in zip(prepared.receive[hop], buffers)
        ]
        for message in prepared.send[hop]:
            packed = torch.empty(message.size, dtype=torch.uint8, device=self.device)
            for slot in message.slots:
                if hop:
                    index, source = next(
                        (i, s) for h, i, s in prepared.arriving[slot.tensor] if h == 0 and s.box == slot.box
                    )
                    values = self._view(arrived[index], source)
                else:
                    values = self._read(held, slot.tensor, slot.box)
                self._view(packed, slot).copy_(values)
            operations += [dist.P2POp(dist.isend, packed, peer, self.group, tag) for peer in message.peers]
        if not operations:
            return buffers, []
        works = dist.batch_isend_irecv(operations)
        if len(works) != len(operations):  # NCCL: one work for the whole group
            return buffers, [(work, operations[0]) for work in works]
        return buffers, list(zip(works, operations))

    def _wait(self, bucket: int, works: _Works) -> None:
        for work, operation in works:
            try:
                if self.on_gloo:
                    work.wait(self.timeout)
                else:
                    work.wait()
            except RuntimeError as error:
                what = "sending to" if operation.op is dist.isend else "receiving from"
                raise WeightSyncError(
                    f"rank {self.rank}: {what} rank {operation.peer} failed in bucket {bucket} of "
                    f"{len(self._prepared)}: {str(error).splitlines()[0]}"
                ) from error

    def _view(self, buffer: torch.Tensor, slot: _Slot) -> torch.Tensor:
        dtype = self.dtype_of(self.plan.tensors[slot.tensor])
        return buffer[slot.start : slot.stop].view(dtype).view(shape_of(slot.box))

    def _read(self, held: Held, tensor: int, box: Box) -> torch.Tensor:
        name = self.plan.tensors[tensor].name
        for outer, view in held.get(name, ()):
            if contains(outer, box):
                return view[slices(shift(box, outer, whole(shape_of(outer))))]
        raise WeightSyncError(f"rank {self.rank} should hold {name}{list(box)} but does not")

    def _assemble(
        self, prepared: _Prepared, tensor: int, box: Box, buffers: list[list[torch.Tensor]], held: Held
    ) -> torch.Tensor:
        """The needed box from what is here and what arrived; without a copy where it is all of one piece."""
        local, arriving = prepared.local.get(tensor, []), prepared.arriving.get(tensor, [])
        dtype = self.dtype_of(self.plan.tensors[tensor])
        if local == [box] and not arriving:
            return self._read(held, tensor, box).to(dtype)
        if not local and len(arriving) == 1 and arriving[0][2].box == box:
            hop, index, slot = arriving[0]
            return self._view(buffers[hop][index], slot)
        data = torch.empty(shape_of(box), dtype=dtype, device=self.device)
        origin = whole(shape_of(box))
        for part in local:
            data[slices(shift(part, box, origin))].copy_(self._read(held, tensor, part))
        for hop, index, slot in arriving:
            data[slices(shift(slot.box, box, origin))].copy_(self._view(buffers[hop][index], slot))
        return data
