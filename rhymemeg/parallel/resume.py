"""Whether a run can go on from a checkpoint, and what it will do. Pure: options of the two runs in, sentences out.

`check(saved, now, ...)` refuses (`CheckpointError`, naming every option that differs) what would silently train on other
prompts than the steps done say, or jump in the learning rate. Whatever else differs is allowed and told: another layout,
more engines, another learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymemeg.errors import CheckpointError

# A number of steps done means the same place in the order of prompts and in the schedule only if these are the same.
PLACE = (
    ("run", "seed"),
    ("rollout", "rollout_batch_size"),
    ("data", "shuffle"),
    ("algorithm", "ppo_epochs"),
    ("algorithm", "num_minibatches"),
)
# What differs here is of no interest.
_OWN = {("run", "output_dir"), ("run", "display"), ("run", "tensorboard"), ("run", "train_iters")}

Options = Mapping[str, Mapping[str, Any]]


def differences(saved: Options, now: Options) -> list[tuple[tuple[str, str], Any, Any]]:
    """((section, option), value in the checkpoint, value now) of what both know and is not the same."""
    return [
        ((section, name), saved[section][name], value)
        for section, options in now.items()
        for name, value in options.items()
        if section in saved and name in saved[section] and saved[section][name] != value
    ]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def check(folder: object, saved: Options, now: Options) -> list[str]:
    """Refuse to go on if the place in the data or the schedule would be lost. Returns remarks."""
    found = [(key, old, new) for key, old, new in differences(saved, now) if key not in _OWN and key[0] != "checkpoint"]
    lost = [f"{_option(key[1])} is {new}, was {old}" for key, old, new in found if key in PLACE]
    if lost:
        raise CheckpointError(
            f"{folder} cannot be resumed with other options that decide which prompts come next or where the schedule is: "
            + "; ".join(lost)
        )
    told = [f"{_option(key[1])} {new} (was {old})" for key, old, new in found]
    return [f"options that differ from the checkpoint's: {', '.join(told)}"] if told else []


def describe(folder: object, steps_done: int, saved: Options, now: Options, num_prompts: int) -> str:
    """What a run that resumes will do."""
    total, before = int(now["run"]["train_iters"]), int(saved["run"]["train_iters"])
    if steps_done >= total:
        return (
            f"{folder} is after step {steps_done}, and --train-iters is {total}: no step to do (a larger --train-iters "
            "goes on)"
        )
    taken = steps_done * int(now["rollout"]["rollout_batch_size"])
    epoch, place = divmod(taken, num_prompts)
    text = f"resuming from {folder}: step {steps_done} of {total}, epoch {epoch + 1}" + (
        f" after {place} of {num_prompts} prompts" if place else " begins"
    )
    optimizer = now["optimizer"]
    if total != before and optimizer["lr_decay_style"] != "constant" and not optimizer["lr_decay_iters"]:
        text += f"; the learning rate now decays over {total} steps instead of {before}"
    return text
