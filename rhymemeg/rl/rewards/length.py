"""Penalties for long responses. Lengths are in tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def overlong_penalty(
    lengths: npt.NDArray[np.int64], max_len: int, buffer_len: int, factor: float
) -> npt.NDArray[np.float64]:
    """Soft overlong punishment: 0 up to `max_len - buffer_len` tokens, from there down in a straight line to -factor at
    `max_len`. DAPO (arXiv 2503.14476), equation 13."""
    over = (lengths - (max_len - buffer_len)) / buffer_len
    return -factor * np.clip(over, 0.0, 1.0)


def length_penalty(response: str, label: Any, *, response_len: int, free: int, longest: int) -> float:
    """A reward in [-1, 0]: 0 for up to `free` tokens, -1 from `longest` tokens on, a straight line between. For use in a
    weighted sum with the reward of the task. Raises ValueError unless `free < longest`."""
    if not 0 <= free < longest:
        raise ValueError(f"length_penalty: free={free} must be less than longest={longest}, and neither negative")
    return float(overlong_penalty(np.array([response_len]), longest, longest - free, 1.0)[0])
