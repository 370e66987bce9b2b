"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomically(path: str | Path, write: str | bytes | Callable[[IO[str]], None]) -> None:
    """Write to `path`: beside it first, flushed to disk, then renamed over it. On any error (full disk, say) the old
    file is untouched and nothing is left behind. `write` is the content, or a function that writes to the open file."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if isinstance(write, bytes):
            with open(aside, "wb") as binary:
                binary.write(write)
                _to_disk(binary)
        else:
            with open(aside, "w", encoding="utf-8") as file:
                if isinstance(write, str):
                    file.write(write)
                else:
                    write(file)
                _to_disk(file)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_path(path: str | Path) -> None:
    """Flush a file that has been written and closed, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
