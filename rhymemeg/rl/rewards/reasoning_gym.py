"""reasoning-gym's own verifiers.

The label of a prompt names the task, its arguments and the whole entry (as `rhymemeg.data.sources` makes it), so that
the verifier is the one that belongs to the generator: `{"task": ..., "task_args": {...}, "entry": {...}}`.
"""

from __future__ import annotations

import functools
from typing import Any

from rhymemeg.rl.rewards.extract import final_answer


def score_answer(response: str, label: Any) -> float:
    """The task's score, in [0, 1], of the response's final answer (`extract.final_answer`)."""
    if not isinstance(label, dict) or not {"task", "task_args", "entry"} <= label.keys():
        raise ValueError("the label is not that of a reasoning-gym prompt (--prompt-data task:NAME)")
    dataset = _dataset(label["task"], repr(sorted(label["task_args"].items())), _Arguments(label["task_args"]))
    return float(dataset.score_answer(final_answer(response), entry=label["entry"]))


class _Arguments:
    """Keeps arguments out of the cache's key, where they need not be hashable; their `repr` is there in their
    place."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arguments)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=32)
def _dataset(task: str, key: str, arguments: _Arguments) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **arguments.arguments)
