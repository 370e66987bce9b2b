"""megatron-core's distributed checkpointing (format `torch_dist`), with two things changed.

**Nothing from a checkpoint is run.** The format keeps its table of contents, `.metadata`, as a pickle, and torch
reads it with `pickle.load`. Here it is read by `torch_dist.read_table`, which refuses what is no table. Tensors and
Megatron's `common.pt` are read by `torch.load(weights_only=True)`; entries of the table that would be unpickled freely
(`BytesStorageMetadata`) are refused, and none are written.

**Writing stays in this process.** Megatron forks writers and starts a manager process for their results; a fork of a
process that holds an engine, Gloo threads and a GPU context is not safe. The same writer function is called directly.

Everything that depends on the version of megatron-core's checkpoint strategies is in this module.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.api import CheckpointException

from rhymemeg.errors import CheckpointError
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.parallel.torch_dist import read_table, tensors_of


class _SafeReader(CachedMetadataFileSystemReader):
    _table: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._table is None:
            self._table = read_table(Path(self.path))
        return self._table


class _InProcessStrategy(torch_strategy.TorchDistSaveShardedStrategy):
    """One file a rank, written by the rank itself."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []

        def write(rank: int, buckets: list[Any], results: queue.Queue) -> None:
            outcome: Any = {}
            for index, bucket in enumerate(buckets):
                done, unfinished = queue.Queue(), _Unfinished()  # type: ignore[var-annotated]
                filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                    transforms, index, bucket, done, unfinished, use_fsync=True
                )
                _, result = done.get_nowait()
                if isinstance(result, Exception):
                    outcome = result
                    break
                outcome[index] = result
            results.put(outcome)

        return request._replace(async_fn=write)


class _Unfinished:
    """The queue by which forked writers would report that they are done."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


@contextlib.contextmanager
def _exchanged(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def without_objects(state: Any) -> Any:
    """The state without pickled objects (Transformer Engine's fp8 bookkeeping, unused here)."""
    if isinstance(state, dict):
        return {k: without_objects(v) for k, v in state.items() if not isinstance(v, ShardedObject)}
    return state


def save(state: dict[str, Any], folder: Path, runtime: Runtime) -> None:
    """Write a sharded state to an existing empty folder. Called by all ranks. A rank that cannot write its file raises
    CheckpointError on all of them."""
    try:
        with _exchanged(filesystem_async, "_get_write_results_queue", queue.Queue):
            dist_checkpointing.save(state, str(folder), _InProcessStrategy())
    except CheckpointException as error:  # raised on all ranks, with the reasons on the coordinator
        reasons = [f"rank {rank}: {_last_line(failure[0])}" for rank, failure in error.failures.items()]
        known = [reason for part in runtime.all_gather_object(reasons) for reason in part]
        raise CheckpointError(known[0] if known else str(error)) from error


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].removeprefix("Worker failure: ")


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read what the sharded state asks for. Called by all ranks."""
    tensors_of(folder, read_table(folder))

    def reader(path: Any, cache_metadata: bool = False) -> _SafeReader:
        return _SafeReader(path)

    with _exchanged(torch_strategy, "_get_filesystem_reader", reader):
        return dist_checkpointing.load(state, str(folder))


def split(state: Any) -> tuple[Any, Any]:
    """The sharded tensors of a state, and the rest of it."""
    tensors, rest = extract_matching_values(state, lambda value: isinstance(value, ShardedBase))
    return tensors, dict_list_map_inplace(
        lambda value: value.unwrap() if isinstance(value, LocalNonpersistentObject) else value, rest
    )


def load_optimizer(optimizer: Any, tensors: list[Any], rest: list[Any], updates: int) -> None:
    """Give each of the chained optimizers its tensors, with the rest as it is now and the step count `updates`.

    Made right for torch's AdamW, whose step count is a tensor of each parameter: Megatron's distributed optimizer looks
    for that tensor among the loaded ones, where it is not, so it is given the present one, which Megatron has set before;
    and it sets the same tensor for all parameters, so that each of them would count every step: they get one each."""
    for mine, loaded in zip(rest, tensors):
        _set_steps(mine, updates)
        merge(mine, loaded)
    parts = optimizer.chained_optimizers
    with contextlib.ExitStack() as stack:
        for part in parts:
            if hasattr(part, "_set_main_param_and_optimizer_states"):
                stack.enter_context(_exchanged(part, "_set_main_param_and_optimizer_states", _with_step(part)))
        optimizer.load_state_dict(rest[0] if len(parts) == 1 else dict(enumerate(rest)))
    for part in parts:
        for present in part.optimizer.state.values():
            if isinstance(present.get("step"), torch.Tensor):
                present["step"] = present["step"].clone()


def _set_steps(state: Any, updates: int) -> None:
    """Replace every step count in an optimizer's state."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        if key in ("step", "common_step"):
            state[key] = torch.full_like(value, updates) if isinstance(value, torch.Tensor) else type(value)(updates)
        else:
            _set_steps(value, updates)


def _with_step(part: Any) -> Any:
    original = part._set_main_param_and_optimizer_states

    def set_states(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = part.model_param_group_index_map[model_param]
        present = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        original(model_param, tensors | ({"step": present["step"]} if "step" in present else {}))

    return set_states
