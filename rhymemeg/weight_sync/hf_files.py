"""Reading and writing Hugging Face checkpoint folders: safetensors only, one file or several with an index.

`HfFolder(folder)` knows which file holds which tensor and reads slices of tensors; nothing is read twice and no file is
unpickled. What is missing, truncated or of the wrong shape is a CheckpointError that names tensor and file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rhymemeg.errors import CheckpointError
from rhymemeg.observe.files import write_atomically
from rhymemeg.weight_sync.boxes import Box, Shape, slices

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What a model folder holds besides weights, and an export takes along.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")


class HfFolder:
    """Use as a context manager: files stay open (memory-mapped) while it is."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self.file_of = self._files()

    def __enter__(self) -> HfFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.clear()

    def _files(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                assert isinstance(files, dict) and all(isinstance(f, str) for f in files.values())
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                raise CheckpointError(f"{index} is not a valid index of weights: {error}") from None
            return files
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        hint = " (pickled weights, *.bin, are not read: convert them)" if any(self.folder.glob("*.bin")) else ""
        raise CheckpointError(f"{self.folder} holds neither {SINGLE} nor {INDEX}{hint}")

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing, though the index names it") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is truncated or not a safetensors file: {error}") from None
        return self._open[name]

    def require(self, tensors: Iterable[str]) -> None:
        """Refuse a folder that lacks one of these tensors."""
        missing = [name for name in tensors if name not in self.file_of]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self.folder} lacks tensor {missing[0]!r}{more} of this architecture")

    def read(self, tensor: str, shape: Shape, boxes: list[Box]) -> list[torch.Tensor]:
        """These boxes of one tensor, which must have this shape."""
        path = self.folder / self.file_of[tensor]
        try:
            view = self._file(self.file_of[tensor]).get_slice(tensor)
        except SafetensorError:
            raise CheckpointError(f"{path} lacks tensor {tensor!r}, though the index names it") from None
        if tuple(view.get_shape()) != shape:
            raise CheckpointError(f"{path}: tensor {tensor!r} has shape {tuple(view.get_shape())}, expected {shape}")
        try:
            return [view[slices(box)] for box in boxes]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot read tensor {tensor!r}: {error}") from None


def write_index(folder: Path, file_of: dict[str, str], total_bytes: int) -> None:
    """The index of a folder of several weight files."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")


def copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Configuration, tokenizer and licence from one model folder to another; the configuration gets the new dtype."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    write_atomically(path, json.dumps(config, indent=2) + "\n")
