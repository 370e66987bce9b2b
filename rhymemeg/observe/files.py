"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomically(path: str | Path, write: str | Callable[[IO[str]], None]) -> None:
    """Write text to `path`: beside it first, flushed to disk, then renamed over it. On any error (full disk, say) the old
    file is untouched and nothing is left behind. `write` is the text, or a function that writes to the open file."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            if isinstance(write, str):
                file.write(write)
            else:
                write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
