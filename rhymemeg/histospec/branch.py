"""Branch choice: the weight with which each document votes where occurrences of a match go on differently. Pure.

    count     every occurrence counts 1 (the authors' published code)
    paper     the reward of its response; branches are compared by the sum over the responses that pass through them
              (arXiv 2508.18588); the index counts instead where no branch has a positive sum, so negative rewards are safe
    recency   2 ** -(visits ago); siblings of the running group, the newest of all, count 2
    reward_recency   the product of `paper` and `recency`

Measured on a public trace, `paper` against `count` made no difference (`tools/replay.py --branch`); it is there to ablate.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rhymemeg.errors import ConfigError

BranchChoice = Literal["count", "paper", "recency", "reward_recency"]


def document_weights(choice: BranchChoice, rewards: NDArray[np.float32], visits_ago: int) -> NDArray[np.float32]:
    """Weights of a visit's responses; `visits_ago` is 0 for the last visit."""
    check_branch_choice(choice)
    weights = np.ones(len(rewards), np.float32)
    if choice in ("paper", "reward_recency"):
        weights = weights * rewards
    if choice in ("recency", "reward_recency"):
        weights = weights * np.float32(2.0**-visits_ago)
    return weights.astype(np.float32)


def live_weight(choice: BranchChoice, rewards: NDArray[np.float32]) -> float:
    """Weight of a running sibling, whose reward is not known yet: that of a typical response of the history."""
    check_branch_choice(choice)
    typical = float(rewards.mean()) if choice in ("paper", "reward_recency") and len(rewards) else 1.0
    return typical * (2.0 if choice in ("recency", "reward_recency") else 1.0)


def check_branch_choice(choice: str) -> None:
    """ConfigError if there is no such choice."""
    if choice not in get_args(BranchChoice):
        raise ConfigError(f"branch choice {choice!r}: known are {', '.join(get_args(BranchChoice))}")
