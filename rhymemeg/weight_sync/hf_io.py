"""Hugging Face checkpoints into the actor and out of it, for every layout.

`load_hf_checkpoint`: each rank reads only the slices that its shards hold, straight into the parameters, cast to their
dtype; padding rows of the vocabulary become zero. To be called before the optimizer copies its master weights.

`export_hf`: a folder that `transformers` and vLLM load. Tensors travel by the same planner and courier as a weight
update, each whole to one rank, and every file is written by one rank, so no rank holds more than a file at a time.
The folder is written beside its place and renamed once complete: a failure (full disk) leaves an older one untouched.
All ranks must see the same file system.

Both are collective: every rank raises the same CheckpointError if any rank fails.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rhymemeg.arch import ModelArch
from rhymemeg.errors import CheckpointError, RhymeMegError
from rhymemeg.observe.files import flush_path
from rhymemeg.weight_sync.actor_side import actor_layout, local_params
from rhymemeg.weight_sync.boxes import numel, slices, whole
from rhymemeg.weight_sync.hf_files import SINGLE, HfFolder, copy_companions, write_index
from rhymemeg.weight_sync.layouts import ModelLayout, Piece
from rhymemeg.weight_sync.moves import Need, Tensor
from rhymemeg.weight_sync.planner import make_plan
from rhymemeg.weight_sync.rules import Vocabulary
from rhymemeg.weight_sync.topology import ActorLayout
from rhymemeg.weight_sync.transfer import Courier, held_views

if TYPE_CHECKING:
    from rhymemeg.parallel.runtime import Runtime

BUCKET_BYTES = 512 << 20
MAX_FILE_BYTES = 4 << 30


def agree(runtime: Runtime, error: Exception | None) -> None:
    """Every rank calls this at the same point. If any brings an error, all raise the first one's."""
    messages = runtime.all_gather_object(None if error is None else str(error))
    for rank, message in enumerate(messages):
        if message is not None:
            raise CheckpointError(message if rank == runtime.rank else f"rank {rank}: {message}") from error


# --------------------------------------------------------------------------------------------------------------- load


def load_hf_checkpoint(
    chunks: Sequence[torch.nn.Module], arch: ModelArch, folder: str | Path, runtime: Runtime
) -> dict[str, float]:
    """Fill the actor's parameters from a Hugging Face folder. Returns the bytes that this rank read."""
    error: Exception | None = None
    read = 0
    try:
        read = _load(local_params(chunks, arch, runtime), ModelLayout(arch), Path(folder), runtime)
    except RhymeMegError as problem:
        error = problem
    agree(runtime, error)
    return {"bytes_read": float(read)}


@torch.no_grad()
def _load(params: dict[str, torch.Tensor], layout: ModelLayout, folder: Path, runtime: Runtime) -> int:
    shapes = layout.hf_tensors()
    wanted: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    for name, tensor in params.items():
        vocabulary = isinstance(layout.parameter(name).rule, Vocabulary)
        padded = tensor.shape[0] * runtime.tp_size if vocabulary else 0
        if vocabulary:
            tensor.zero_()
        for piece in layout.pieces(name, runtime.tp_rank, runtime.tp_size, runtime.etp_rank, runtime.etp_size, padded):
            wanted[piece.hf_name].append((piece, tensor))
    read = 0
    with HfFolder(folder) as files:
        files.require(shapes)
        # In the order of the files, so that each is read from front to back.
        for name in sorted(wanted, key=lambda n: (files.file_of[n], n)):
            values = files.read(name, shapes[name], [piece.hf_box for piece, _ in wanted[name]])
            for (piece, tensor), value in zip(wanted[name], values):
                tensor[slices(piece.local_box)].copy_(value)
                read += value.numel() * value.element_size()
    return read


# ------------------------------------------------------------------------------------------------------------- export


@dataclass
class _File:
    name: str
    tensors: list[str]
    size: int
    writer: int


class _Writers:
    """Target of an export: every tensor goes whole to the rank that writes its file."""

    def __init__(self, files: list[_File], world: int) -> None:
        self.lanes = world
        ranks = [(rank,) for rank in range(world)]
        self._writer = {tensor: ranks[file.writer] for file in files for tensor in file.tensors}

    def needs(self, tensor: Tensor) -> tuple[Need, ...]:
        ranks = self._writer[tensor.name]
        return (Need(whole(tensor.shape), ranks, ranks),)


def plan_files(layout: ModelLayout, actor: ActorLayout, itemsize: int, max_file_bytes: int) -> list[_File]:
    """Cut the checkpoint, in the model's order, into files of at most `max_file_bytes` (a larger tensor alone), each
    written by a rank of the pipeline stage that holds its first tensor, in turn."""
    files: list[_File] = []
    first_layer: list[int | None] = []
    for p in layout.parameters():
        for part in p.rule.parts:
            size = numel(whole(part.shape)) * (4 if part.float32 else itemsize)
            if not files or files[-1].size + size > max_file_bytes:
                files.append(_File("", [], 0, 0))
                first_layer.append(p.layer)
            files[-1].tensors.append(p.hf_name(part))
            files[-1].size += size
    turn: dict[int, int] = defaultdict(int)
    for number, (file, layer) in enumerate(zip(files, first_layer)):
        stage = 0 if layer is None and number == 0 else actor.pp - 1 if layer is None else actor.stage_of_layer[layer]
        members = [rank for rank, c in enumerate(actor.ranks) if c.pp == stage]
        file.writer = members[turn[stage] % len(members)]
        turn[stage] += 1
        file.name = SINGLE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
    return files


def export_hf(
    chunks: Sequence[torch.nn.Module],
    arch: ModelArch,
    runtime: Runtime,
    folder: str | Path,
    source_folder: str | Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the actor's weights as `folder`; configuration and tokenizer are copied from `source_folder`."""
    target, source = Path(folder), Path(source_folder)
    aside = target.with_name(f".{target.name}.writing")
    params = local_params(chunks, arch, runtime)
    layout, actor = ModelLayout(arch), actor_layout(chunks, arch, runtime)
    dtype = runtime.broadcast_object(next(iter(params.values())).dtype)
    files = plan_files(layout, actor, dtype.itemsize, max_file_bytes)
    plan = make_plan(layout, actor, _Writers(files, runtime.world_size), dtype.itemsize, BUCKET_BYTES)
    error: Exception | None = None
    if runtime.is_rank0:
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            copy_companions(source, aside, dtype)
            if len(files) > 1:
                write_index(aside, {t: f.name for f in files for t in f.tensors}, sum(f.size for f in files))
        except (OSError, ValueError) as problem:
            error = CheckpointError(f"cannot write {target}: {problem}")
    _agree_or_remove(runtime, error, aside)
    group = dist.new_group(backend=runtime.backend, timeout=runtime.timeout)
    try:
        courier = Courier(plan, runtime.rank, group, runtime.device, dtype, runtime.timeout)
        error = _write_files(courier, files, held_views(params, layout, actor, runtime.rank), aside, target)
    finally:
        dist.destroy_process_group(group)
    _agree_or_remove(runtime, error, aside)
    if runtime.is_rank0:
        try:
            _swap_in(aside, target)
        except OSError as problem:
            error = CheckpointError(f"cannot put {target} in place: {problem}")
    agree(runtime, error)


def _agree_or_remove(runtime: Runtime, error: Exception | None, aside: Path) -> None:
    """`agree`; where it raises, the unfinished folder goes first."""
    try:
        agree(runtime, error)
    except CheckpointError:
        if runtime.is_rank0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_files(
    courier: Courier,
    files: list[_File],
    held: dict[str, list[tuple[tuple[tuple[int, int], ...], torch.Tensor]]],
    aside: Path,
    target: Path,
) -> Exception | None:
    """Write this rank's files as their tensors arrive. After an error the transfer still runs to its end, since the
    other ranks wait for this one's slices."""
    from safetensors.torch import save_file

    error: Exception | None = None
    file_of = {tensor: file for file in files for tensor in file.tensors}
    content: dict[str, torch.Tensor] = {}
    for tensor, _, data in courier.deliver(held):
        if data is None or error is not None:
            continue
        file = file_of[tensor.name]
        content[tensor.name] = data.contiguous().cpu()
        if len(content) == len(file.tensors):
            try:
                save_file(content, aside / file.name, metadata={"format": "pt"})
                flush_path(aside / file.name)
            except Exception as problem:
                error = CheckpointError(f"cannot write {target / file.name}: {problem}")
            content = {}
    return error


def _swap_in(aside: Path, target: Path) -> None:
    """Rename the finished folder to its place; an older one disappears only then."""
    for file in (*aside.iterdir(), aside):
        flush_path(file)
    if not target.exists():
        os.replace(aside, target)
        return
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(target, old)
    os.replace(aside, target)
    shutil.rmtree(old, ignore_errors=True)
