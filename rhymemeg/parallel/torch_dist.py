"""The files of torch's distributed checkpoint format (`torch_dist`, which Megatron-core writes). Needs torch, not Megatron.

    .metadata          table of contents: every tensor's shape and type, its chunks, and where each of them lies
    __K_0.distcp       chunks, each as `torch.save` writes a tensor
    metadata.json, common.pt       what Megatron looks for besides: versions, and state that is not tensors (none here)

`read_table` and `TensorReader` read, `TensorWriter` writes such a folder one tensor after the other, so that neither needs
memory for more than one. **Nothing from a folder is run**: the table is a pickle, read by an unpickler that knows the dozen
classes such a table consists of and refuses every other name; tensors are read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rhymemeg.errors import CheckpointError
from rhymemeg.weight_sync.boxes import Box, Shape, intersect, shape_of

TABLE = ".metadata"

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
} | {
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"its table of contents names {module}.{name}, which no checkpoint of this program does")


def read_table(folder: Path) -> Metadata:
    """The table of contents of a checkpoint. Raises CheckpointError naming the file."""
    file = folder / TABLE
    try:
        with file.open("rb") as stream:
            table = _TableUnpickler(stream).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file} is not trusted: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(table, Metadata):
        raise CheckpointError(f"{file} is not trusted: it holds {type(table).__name__}, not a table of contents")
    return table


def tensors_of(folder: Path, table: Metadata) -> dict[str, TensorStorageMetadata]:
    """The table's tensors by name. An entry that would be unpickled freely is refused."""
    found = {}
    for name, entry in table.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder / TABLE} is not trusted: {name} is a pickled object, not a tensor")
        found[name] = entry
    return found


class TensorReader:
    """Reads boxes of tensors. `tensors` is the table of contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        table = read_table(folder)
        self.tensors = tensors_of(folder, table)
        self._records: dict[MetadataIndex, Any] = dict(table.storage_data or {})

    def read(self, name: str, box: Box) -> Tensor:
        """One box of a tensor. Raises CheckpointError naming tensor and file if a chunk of it is missing or cannot be read."""
        entry = self.tensors[name]
        result = torch.empty(shape_of(box), dtype=entry.properties.dtype)
        missing = result.numel()
        for chunk in entry.chunks:
            place: Box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
            common = intersect(place, box)
            if common is None:
                continue
            target = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, box))
            source = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, place))
            values = self._chunk(name, chunk)[source]
            result[target] = values
            missing -= values.numel()
        if missing:
            raise CheckpointError(f"{self.folder / TABLE}: {missing} elements of {name} are in no chunk")
        return result

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        record = self._records.get(MetadataIndex(name, chunk.offsets))
        if record is None or Path(record.relative_path).name != record.relative_path:
            raise CheckpointError(f"{self.folder / TABLE} does not say where {name} lies")
        file = self.folder / record.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(record.offset)
                data = stream.read(record.length)
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            if not isinstance(values, Tensor) or values.shape != chunk.sizes:
                raise CheckpointError("its shape is not that of the table of contents")
            return values
        except Exception as error:
            raise CheckpointError(f"{file}: cannot read {name}: {str(error).splitlines()[0]}") from None


class TensorWriter:
    """Writes a folder: `add` each chunk, then `close`. Files are cut at `max_file_bytes` and synced."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self.folder, self.max_file_bytes = folder, max_file_bytes
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._records: dict[MetadataIndex, _StorageInfo] = {}
        self._files: list[str] = []
        self._stream: IO[bytes] | None = None

    def add(self, name: str, shape: Shape, offsets: Shape, values: Tensor) -> None:
        """Write one chunk of a tensor of this whole shape."""
        entry = self._tensors.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=values.dtype), torch.Size(shape), [])
        )
        if entry.properties.dtype != values.dtype or entry.size != torch.Size(shape):
            raise CheckpointError(f"{name}: a part is {values.dtype}, another {entry.properties.dtype}")
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.shape))
        stream = self._file()
        start = stream.tell()
        torch.save(values.contiguous().clone(), stream)
        index = MetadataIndex(name, torch.Size(offsets))
        self._records[index] = _StorageInfo(self._files[-1], start, stream.tell() - start)

    def _file(self) -> IO[bytes]:
        if self._stream is not None and self._stream.tell() >= self.max_file_bytes:
            self._finish_file()
        if self._stream is None:
            self._files.append(f"__{len(self._files)}_0.distcp")
            self._stream = (self.folder / self._files[-1]).open("wb")
        return self._stream

    def _finish_file(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def close(self) -> list[str]:
        """Write the table of contents. Returns the names of all files."""
        self._finish_file()
        table = Metadata(state_dict_metadata=dict(self._tensors), storage_data=self._records)
        (self.folder / TABLE).write_bytes(pickle.dumps(table))
        torch.save({}, self.folder / "common.pt")
        versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        versions |= {"common_backend": "torch", "common_backend_version": 1}
        (self.folder / "metadata.json").write_text(json.dumps(versions), encoding="utf-8")
        return [*self._files, TABLE, "common.pt", "metadata.json"]
