"""The files of a checkpoint: its manifest, their checksums, and the *pieces* that other parts of the program keep in it.
Imports neither torch nor Megatron.

A piece is a byte string that one rank saves under a name, so that a part of the program can keep its own state with the
weights (an engine's history, paused requests, a scheduler's statistics):

    checkpoints.save(actor, steps_done, state, files={"history": buffer.to_bytes()})      all ranks; each its own pieces
    for rank, data in checkpoints.load_files(folder, "history"): ...                      any rank, any number of ranks

* What the bytes mean is the part's own business (JSON, its own format). They are data: nothing here unpickles them, and
  no part may.
* A rank need not save a name that others save; `{}` is fine. Names are lower-case letters, digits, `_` and `-`.
* Reading gives every rank's piece of a name in the order of the ranks that saved, one in memory at a time, whatever the
  number of ranks is now. The reader keeps what is its own now: a rank number says who *saved* the piece.
* A piece lies in the checkpoint as `piece_RANK.NAME`, listed in the manifest like every other file, and becomes visible
  with it. Its checksum is compared when the checkpoint is loaded and again on the bytes that `read_pieces` returns.

`DamagedCheckpointError` says that a checkpoint is not what was written (a file missing, cut short, changed); other
`CheckpointError`s say that it is whole but does not fit.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymemeg.errors import CheckpointError

MANIFEST, STATE = "manifest.json", "state.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_PIECE = re.compile(rf"piece_(\d+)\.({_NAME.pattern})")


class DamagedCheckpointError(CheckpointError):
    """The files are not those that were written."""


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and CRC-32."""

    size: int
    crc32: int


# --------------------------------------------------------------------------------------------------------- single files


def sync(path: Path) -> int:
    """fsync a file or folder; returns its size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(8 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises DamagedCheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing, so the checkpoint is not complete") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{path} does not hold a JSON object")
    return value


# ------------------------------------------------------------------------------------------------------------- manifest


def write_manifest(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """List the files of a checkpoint, and sync."""
    listed = {name: {"size": facts.size, "crc32": facts.crc32} for name, facts in sorted(files.items())}
    (folder / MANIFEST).write_text(json.dumps({"files": listed}, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, FileFacts]:
    """File name -> size and checksum, in the order of names."""
    path = folder / MANIFEST
    files = read_json(path).get("files")
    try:
        assert isinstance(files, dict)
        facts = {str(name): FileFacts(int(f["size"]), int(f["crc32"])) for name, f in sorted(files.items())}
    except (AssertionError, KeyError, TypeError, ValueError):
        raise DamagedCheckpointError(f"{path} does not list files with their size and checksum") from None
    for name in facts:
        if Path(name).name != name:
            raise DamagedCheckpointError(f"{path} names {name!r}, which is not a file of the checkpoint")
    return facts


def verify(
    folder: Path, files: Mapping[str, FileFacts], share: int = 0, shares: int = 1, checksums: bool = True
) -> None:
    """Compare the size of every file and the checksum of every `shares`-th from `share` on with the manifest's."""
    for i, (name, facts) in enumerate(files.items()):
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing")
        if file.stat().st_size != facts.size:
            raise DamagedCheckpointError(f"{file} has {file.stat().st_size} bytes instead of {facts.size}")
        if checksums and i % shares == share and checksum(file) != facts.crc32:
            raise DamagedCheckpointError(f"{file} is corrupt: its checksum is not that of the manifest")


# --------------------------------------------------------------------------------------------------------------- pieces


def write_pieces(folder: Path, rank: int, pieces: Mapping[str, bytes]) -> None:
    """Write a rank's pieces to a checkpoint that is being made."""
    for name, data in pieces.items():
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} is not a name for a piece of a checkpoint")
        (folder / f"piece_{rank}.{name}").write_bytes(data)


def piece_owner(file_name: str) -> int | None:
    """The rank that wrote the piece in this file; None for other files."""
    match = _PIECE.fullmatch(file_name)
    return int(match[1]) if match else None


def piece_names(folder: Path) -> list[str]:
    """The names under which pieces were saved."""
    return sorted({match[2] for name in read_manifest(folder) if (match := _PIECE.fullmatch(name))})


def read_pieces(folder: Path, name: str) -> Iterator[tuple[int, bytes]]:
    """(rank that saved it, its bytes) of every piece of this name, in the order of ranks; nothing if there is none.
    Raises DamagedCheckpointError naming the file."""
    files = read_manifest(folder)
    found = [(int(m[1]), file) for file in files if (m := _PIECE.fullmatch(file)) and m[2] == name]
    for rank, file in sorted(found):
        try:
            data = (folder / file).read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{folder / file} is missing") from None
        if FileFacts(len(data), zlib.crc32(data)) != files[file]:
            raise DamagedCheckpointError(f"{folder / file} is corrupt: its checksum is not that of the manifest")
        yield rank, data
