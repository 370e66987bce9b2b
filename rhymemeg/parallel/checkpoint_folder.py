"""The checkpoints of a run: which to load, where to save, which to keep.

    checkpoints/step_00000010/        the state after 10 steps; appears whole or not at all (see `checkpoint`)

A checkpoint's name is its number of steps done, and a folder under that name is complete, so the newest one is found
without a file that could point at something else.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from rhymemeg.config import CheckpointOptions
from rhymemeg.errors import CheckpointError
from rhymemeg.parallel.actor import Actor
from rhymemeg.parallel.runtime import Runtime

_NAME = re.compile(r"step_(\d+)")


class CheckpointFolder:
    """`path` is the run's folder of checkpoints; all ranks see the same file system."""

    def __init__(self, path: Path, options: CheckpointOptions, runtime: Runtime) -> None:
        self.path, self.options, self.runtime = path, options, runtime

    def saved(self) -> list[tuple[int, Path]]:
        """(steps done, folder) of the checkpoints that are there, oldest first."""
        if not self.path.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.path.iterdir() if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
        return sorted(found)

    def to_load(self) -> Path | None:
        """The folder that `--load` names, the newest of this run for 'auto', or None to start afresh. Rank 0 looks, so
        that all ranks get the same answer."""
        answer: Any = None
        if self.runtime.is_rank0 and self.options.load:
            answer = self._find()
        answer = self.runtime.broadcast_object(answer)
        if isinstance(answer, CheckpointError):
            raise answer
        return answer

    def _find(self) -> Path | CheckpointError | None:
        if self.options.load == "auto":
            saved = self.saved()
            return saved[-1][1] if saved else None
        folder = Path(self.options.load)
        if not folder.is_dir():
            return CheckpointError(f"--load: {folder} does not exist")
        inside = (
            sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name)) if not _NAME.fullmatch(folder.name) else []
        )
        return inside[-1] if inside else folder

    def save(self, actor: Actor, steps_done: int, state: dict[str, Any]) -> Path:
        """Save, then remove the oldest beyond --keep-last."""
        folder = self.path / f"step_{steps_done:08d}"
        actor.save_checkpoint(folder, state)
        if self.runtime.is_rank0:
            for _, old in self.saved()[: -self.options.keep_last]:
                shutil.rmtree(old, ignore_errors=True)
        return folder
