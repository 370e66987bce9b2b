"""The checkpoints of a run: which to load, where to save, which to keep.

    checkpoints/step_00000010/        the state after 10 steps; appears whole or not at all (see `checkpoint`)
    checkpoints/step_00000010.critic/ of a run with a critic: the critic's, which is there before the other appears

A checkpoint's name is its number of steps done, and a folder under that name is complete, so the newest one is found
without a file that could point at something else.

Of the checkpoints, the newest `--keep-last` stay, and those of every `--keep-every`-th step. A run that starts afresh or
goes back in a folder with later checkpoints sets those aside as `step_N.replaced`, so that `--load auto` finds its own;
nothing removes them.

Other parts of the program keep their state in the checkpoint by `save(..., files=...)` and `load_files`; the contract is
in `checkpoint_files`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rhymemeg.config import CheckpointOptions
from rhymemeg.errors import CheckpointError
from rhymemeg.parallel.actor import Actor
from rhymemeg.parallel.checkpoint import together
from rhymemeg.parallel.checkpoint_files import DamagedCheckpointError, read_pieces
from rhymemeg.parallel.critic import Critic
from rhymemeg.parallel.runtime import Runtime

_NAME = re.compile(r"step_(\d+)")


class CheckpointFolder:
    """`path` is the run's folder of checkpoints; all ranks see the same file system. `warnings` collects what the user
    should hear of."""

    def __init__(self, path: Path, options: CheckpointOptions, runtime: Runtime) -> None:
        self.path, self.options, self.runtime = path, options, runtime
        self.warnings: list[str] = []

    def saved(self) -> list[tuple[int, Path]]:
        """(steps done, folder) of the checkpoints that are there, oldest first."""
        if not self.path.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.path.iterdir() if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
        return sorted(found)

    # ---------------------------------------------------------------------------------------------------------- loading

    def to_load(self) -> Path | None:
        """The folder that `--load` names, the newest of this run for 'auto', or None to start afresh. Rank 0 looks, so
        that all ranks get the same answer."""
        candidates = self._candidates()
        return candidates[0] if candidates else None

    def load(self, actor: Actor, critic: Critic | None = None) -> tuple[Path, dict[str, Any]] | None:
        """Restore the actor, and the critic if there is one, from the checkpoint of `to_load`. Returns the checkpoint and
        its extra state, or None to start afresh. With 'auto', a damaged checkpoint is passed over for the next older
        one, with a warning; one that is whole but does not fit is an error."""
        together(self.runtime, lambda: self._tidy() if self.runtime.is_rank0 else None)
        candidates = self._candidates()
        for i, folder in enumerate(candidates):
            try:
                state = actor.load_checkpoint(folder)
                if critic is not None:
                    critic.load_checkpoint(_of_critic(folder))
                return folder, state
            except DamagedCheckpointError as error:
                if i + 1 == len(candidates):
                    raise
                self.warnings.append(f"{error}; going back to {candidates[i + 1].name}")
        return None

    def begin(self, first_step: int) -> None:
        """Call once before the first save, with the number of steps that the run starts from."""

        def set_aside() -> None:
            for steps, folder in self.saved():
                for part in (folder, _of_critic(folder)):
                    if steps > first_step and part.is_dir():
                        target = part.with_name(f"{part.name}.replaced")
                        shutil.rmtree(target, ignore_errors=True)
                        os.replace(part, target)

        later = [folder.name for steps, folder in self.saved() if steps > first_step]
        together(self.runtime, lambda: set_aside() if self.runtime.is_rank0 else None)
        if later:
            self.warnings.append(
                f"{self.path} holds checkpoints of a run beyond step {first_step}: {', '.join(later)} set aside as *.replaced"
            )

    def load_files(self, folder: Path, name: str) -> Iterator[tuple[int, bytes]]:
        """(rank that saved it, bytes) of the pieces of this name in a checkpoint. Not collective; see
        `checkpoint_files`."""
        return read_pieces(folder, name)

    def _candidates(self) -> list[Path]:
        """What may be loaded, best first. The same on all ranks."""
        answer: Any = []
        if self.runtime.is_rank0 and self.options.load:
            answer = self._find()
        answer = self.runtime.broadcast_object(answer)
        if isinstance(answer, CheckpointError):
            raise answer
        found: list[Path] = answer
        return found

    def _find(self) -> list[Path] | CheckpointError:
        if self.options.load == "auto":
            return [folder for _, folder in reversed(self.saved())]
        folder = Path(self.options.load)
        if not folder.is_dir():
            return CheckpointError(f"--load: {folder} does not exist")
        inside = CheckpointFolder(folder, self.options, self.runtime).saved()
        return [inside[-1][1]] if inside else [folder]

    def _tidy(self) -> None:
        """Remove what a save left that was killed: a checkpoint half written; or, where it was killed between its two
        renames, put the older one back in place."""
        if not self.path.is_dir():
            return
        for leftover in self.path.glob(".step_*.old"):
            place = leftover.with_name(leftover.name.removeprefix(".").removesuffix(".old"))
            if not place.exists():
                os.replace(leftover, place)
        for leftover in self.path.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for critic in self.path.glob("step_*.critic"):
            if not critic.with_suffix("").exists():
                shutil.rmtree(critic, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        actor: Actor,
        steps_done: int,
        state: dict[str, Any],
        files: Mapping[str, bytes] | None = None,
        critic: Critic | None = None,
    ) -> Path:
        """Save, then remove the oldest beyond --keep-last. `files` are this rank's pieces (`checkpoint_files`)."""
        folder = self.path / f"step_{steps_done:08d}"
        if critic is not None:
            critic.save_checkpoint(_of_critic(folder), {"step": steps_done})
        actor.save_checkpoint(folder, state, files)
        if self.runtime.is_rank0:
            for old in self._beyond():
                shutil.rmtree(old, ignore_errors=True)
                shutil.rmtree(_of_critic(old), ignore_errors=True)
        return folder

    def _beyond(self) -> list[Path]:
        """Checkpoints that are not kept."""
        every = self.options.keep_every
        return [path for steps, path in self.saved()[: -self.options.keep_last] if not every or steps % every]


def _of_critic(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.critic")
