"""Checkpoints of the actor: everything that training needs to go on as if it had not stopped.

    folder/
      manifest.json          size and CRC-32 of every other file; written last
      state.json             format, model, layout, package versions, optimizer steps done, and the caller's extra state
      .metadata, common.pt, metadata.json, __RANK_0.distcp      megatron-core: weights, optimizer moments, fp32 masters
      rng_RANK.safetensors   random generators of each rank
      piece_RANK.NAME        what other parts of the program keep here, as bytes (`checkpoint_files`)

Saved on one layout, a checkpoint loads on another: Megatron's state names whole tensors, of which each rank takes its
part (generators are restored only on the same number of ranks; without dropout training does not use them).

Writing: all ranks write to `.NAME.saving` beside the target; every file is synced and read back for its checksum, the
table of contents is checked against the files, then one rename makes the checkpoint visible. Until then, an older
checkpoint of that name stays as it was, whatever happens (a full disk, a killed rank).

Reading: sizes and checksums first, each file by one rank; nothing in a checkpoint is unpickled freely
(`torch_dist`). Errors are `CheckpointError`s that name the file, the same on all ranks. All ranks must see the
same file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rhymemeg.errors import CheckpointError, RhymeMegError
from rhymemeg.observe.run_dir import package_versions
from rhymemeg.parallel import dist_checkpoint
from rhymemeg.parallel.checkpoint_files import (
    STATE,
    DamagedCheckpointError,
    FileFacts,
    checksum,
    piece_owner,
    read_json,
    read_manifest,
    sync,
    verify,
    write_manifest,
    write_pieces,
)
from rhymemeg.parallel.cpu_backend import megatron_calls
from rhymemeg.parallel.torch_dist import read_table

if TYPE_CHECKING:
    from rhymemeg.parallel.runtime import Runtime
    from rhymemeg.parallel.trained_model import TrainedModel

FORMAT = 2

# How the distributed optimizer's shards are written: as whole tensors of the model, so that any layout can read them,
# gathered in host memory one buffer after the other.
_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}

T = TypeVar("T")


def together(runtime: Runtime, what: Callable[[], T]) -> T:
    """Run `what` (no collectives inside) on all ranks. If it fails on any, all raise the first one's
    CheckpointError."""
    result: Any = None
    failure: tuple[str, bool] | None = None
    try:
        result = what()
    except (RhymeMegError, OSError) as error:
        failure = str(error), isinstance(error, DamagedCheckpointError)
    failures = [failure for failure in runtime.all_gather_object(failure) if failure is not None]
    if failures:
        text, damaged = failures[0]
        raise DamagedCheckpointError(text) if damaged else CheckpointError(text)
    return result


# ----------------------------------------------------------------------------------------------------------------- save


def save(
    actor: TrainedModel, path: Path, extra_state: dict[str, Any], files: Mapping[str, bytes] | None = None
) -> None:
    """Write a checkpoint at `path`, replacing one that is there. `extra_state` must be made of JSON values; `files` are
    this rank's pieces (`checkpoint_files`)."""
    runtime = actor.runtime
    pieces = files or {}
    aside = path.parent / f".{path.name}.saving"
    with _named_errors(f"saving {path}"), _torn_writes_explained():
        piece_bytes = int(runtime.reduce_sum([sum(map(len, pieces.values()))])[0])
        together(runtime, lambda: _start(actor, aside, extra_state, piece_bytes))
        try:
            with megatron_calls():
                dist_checkpoint.save(_sharded_state(actor, is_loading=False)[0], aside, runtime)
            together(runtime, lambda: _write_own(actor, aside, extra_state, pieces))
            listed = runtime.all_gather_object(together(runtime, lambda: _own_files(aside, runtime)))
            together(runtime, lambda: _publish(aside, path, listed) if runtime.is_rank0 else None)
        except Exception:
            if runtime.is_rank0:
                shutil.rmtree(aside, ignore_errors=True)
            raise


@contextlib.contextmanager
def _named_errors(doing: str) -> Iterator[None]:
    """Megatron's and the operating system's errors as one sentence."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{doing}: {error}") from None
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CheckpointError(f"{doing}: {text[-1] if text else type(error).__name__}") from error


@contextlib.contextmanager
def _torn_writes_explained() -> Iterator[None]:
    """torch's file writer reports a write that was cut short by its own check of positions, without the system's reason."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if "inline_container" not in text and "PytorchStreamWriter" not in text:
            raise
        raise CheckpointError(
            "a file could not be written in full (is the disk full, or a quota or file-size limit reached?); checkpoints "
            "saved before are as they were"
        ) from error


def _start(actor: TrainedModel, aside: Path, extra_state: dict[str, Any], piece_bytes: int) -> None:
    """Make an empty folder on a disk with room for the checkpoint."""
    try:
        json.dumps(extra_state)
    except TypeError as error:
        raise CheckpointError(f"the extra state is not made of JSON values: {error}") from None
    if not actor.runtime.is_rank0:
        return
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    itemsize = next(actor.chunks[0].parameters()).element_size()
    needed = piece_bytes + actor.arch.num_parameters() * (itemsize + 12)  # parameters, fp32 masters, two fp32 moments
    free = shutil.disk_usage(aside).free
    if free < needed:
        raise CheckpointError(f"the disk is full: it needs {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free")


def _sharded_state(actor: TrainedModel, is_loading: bool) -> tuple[dict[str, Any], list[Any]]:
    """Megatron's description of this rank's shards of the model and of the optimizer's tensors; and what is left of each
    optimizer's state, which follows from the options and the number of updates and is not saved."""
    single = len(actor.chunks) == 1
    models: dict[str, Any] = {}
    for i, chunk in enumerate(actor.chunks):
        state: Any = chunk.sharded_state_dict(metadata=dict(_SHARDING))  # type: ignore[operator]
        models["model" if single else f"model{i}"] = dist_checkpoint.without_objects(state)
    parts = actor.optimizer.chained_optimizers
    for part in parts:
        # While loading, the count is set afterwards, but Megatron leaves out one that is zero.
        _allocate_moments(part.optimizer, steps=1.0 if is_loading else 0.0)
    states = actor.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=dict(_SHARDING))
    shards, rest = {}, []
    for i in range(len(parts)):
        # Experts have an optimizer of their own under expert parallelism only: the tensors' names do not depend on it.
        tensors, others = dist_checkpoint.split(states if len(parts) == 1 else states[i])
        if tensors:  # ranks that have handed theirs to another one describe nothing
            shards[f"optimizer{i}"] = tensors
        rest.append(others)
    return {**models, **shards}, rest


def _allocate_moments(optimizer: Any, steps: float) -> None:
    """Torch's AdamW has no state before its first step, and then Megatron can describe none."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(steps), **moments}


def _write_own(actor: TrainedModel, aside: Path, extra_state: dict[str, Any], pieces: Mapping[str, bytes]) -> None:
    """The files that are not Megatron's."""
    runtime = actor.runtime
    write_pieces(aside, runtime.rank, pieces)
    save_file(_generators(runtime), aside / f"rng_{runtime.rank}.safetensors")
    if runtime.is_rank0:
        state = {
            "format": FORMAT,
            "model": _model(actor),
            "num_parameters": actor.arch.num_parameters(),
            "versions": package_versions(),
            "layout": actor.config.parallel.model_dump(mode="json"),
            "world_size": runtime.world_size,
            "updates": actor.updates,
            "extra_state": extra_state,
        }
        (aside / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def _own_files(aside: Path, runtime: Runtime) -> dict[str, FileFacts]:
    """Size and checksum of the files that this rank wrote, synced to disk and read back. Rank 0 takes the common
    ones."""
    mine = [p for p in aside.iterdir() if _writer(p.name) == runtime.rank]
    return {p.name: FileFacts(sync(p), checksum(p)) for p in mine}


def _writer(name: str) -> int:
    """The rank that wrote a file of a checkpoint."""
    for prefix, end in (("__", "_"), ("rng_", ".")):
        if name.startswith(prefix):
            return int(name.removeprefix(prefix).partition(end)[0])
    return piece_owner(name) or 0


def _publish(aside: Path, path: Path, listed: list[dict[str, FileFacts]]) -> None:
    files = {name: facts for part in listed for name, facts in part.items()}
    table = read_table(aside)
    for index, record in (table.storage_data or {}).items():
        facts = files.get(record.relative_path)
        if facts is None or record.offset + record.length > facts.size:
            raise CheckpointError(f"{index.fqn} is not whole in {record.relative_path}")
    write_manifest(aside, files)
    sync(aside)
    old = path.parent / f".{path.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(aside, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------------- load


def load(actor: TrainedModel, path: Path) -> dict[str, Any]:
    """Restore the actor from a checkpoint. Returns the extra state."""
    runtime = actor.runtime
    state = together(runtime, lambda: _check(actor, path))
    with _named_errors(f"loading {path}"), megatron_calls():
        shards, rest = _sharded_state(actor, is_loading=True)
        loaded = dist_checkpoint.load(shards, path)
        for i, chunk in enumerate(actor.chunks):
            name = "model" if len(actor.chunks) == 1 else f"model{i}"
            missing = chunk.load_state_dict(loaded[name], strict=False).missing_keys
            missing = [key for key in missing if not key.endswith("_extra_state")]
            if missing:
                raise CheckpointError(f"it lacks {missing[0]}")
        tensors = [loaded.get(f"optimizer{i}", {}) for i in range(len(rest))]
        dist_checkpoint.load_optimizer(actor.optimizer, tensors, rest, int(state["updates"]))
    actor.updates = int(state["updates"])
    generators = path / f"rng_{runtime.rank}.safetensors"
    if int(state["world_size"]) == runtime.world_size and generators.is_file():
        _restore_generators(load_file(generators), runtime)
    extra: dict[str, Any] = state["extra_state"]
    return extra


def _model(actor: TrainedModel) -> dict[str, Any]:
    """What the weights of a checkpoint mean, as JSON values. Its end-of-text tokens and longest sequence may change."""
    arch = dataclasses.asdict(actor.arch)
    del arch["eos_token_ids"], arch["max_position_embeddings"]
    dtype = str(next(actor.chunks[0].parameters()).dtype).removeprefix("torch.")
    described: dict[str, Any] = json.loads(json.dumps(arch | {"params_dtype": dtype}))
    return described


def _check(actor: TrainedModel, path: Path) -> dict[str, Any]:
    """Read and check what is not Megatron's; each rank verifies its share of the files."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    files = read_manifest(path)
    state = read_json(path / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this program (format {state.get('format')!r})")
    there, here = state["model"], _model(actor)
    different = [
        f"{name} is {there.get(name)!r}, not {value!r}" for name, value in here.items() if there.get(name) != value
    ]
    if different:
        raise CheckpointError(f"{path} is of another model: {'; '.join(different)}")
    verify(path, files, actor.runtime.rank, actor.runtime.world_size)
    return state


# ----------------------------------------------------------------------------------------------------- random
# generators


def _generators(runtime: Runtime) -> dict[str, Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"cpu": torch.get_rng_state()}
    if runtime.device_type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"megatron.{name}": value for name, value in get_cuda_rng_tracker().get_states().items()}
    return {name: value.clone() for name, value in states.items()}


def _restore_generators(states: dict[str, Tensor], runtime: Runtime) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    if runtime.device_type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "megatron."
    get_cuda_rng_tracker().set_states({n[len(prefix) :]: v for n, v in states.items() if n.startswith(prefix)})
