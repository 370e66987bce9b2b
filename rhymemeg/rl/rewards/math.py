"""Mathematical equality, by math-verify."""

from __future__ import annotations

import functools
import logging
from typing import Any

from rhymemeg.rl.rewards.extract import boxed


def math_verify(response: str, label: Any, *, need_box: bool = True) -> float:
    r"""1 if the answer in the last `\boxed{...}` equals the label, or one of the labels if it is a list, else 0.
    Without `need_box`, math-verify may also find the answer elsewhere in the response. Labels are LaTeX or plain,
    with or without dollar signs or box. Raises ValueError for a label that cannot be read.

    math-verify's own time-outs are off: they need signals in the main thread. It is registered as `isolated` in their
    place.
    """
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for each odd response
    answer = boxed(response)
    if answer is None and need_box:
        return 0.0
    text = rf"\boxed{{{answer}}}" if answer is not None else response
    parsed = library.parse(text, parsing_timeout=0)
    labels = label if isinstance(label, list | tuple) else [label]
    return float(any(library.verify(_gold(str(one)), parsed, timeout_seconds=0) for one in labels))


@functools.lru_cache(maxsize=4096)
def _gold(label: str) -> Any:
    import math_verify as library

    text = label if "$" in label or r"\boxed" in label else f"${label}$"
    parsed = library.parse(text, parsing_timeout=0)
    if not parsed:
        raise ValueError(f"math-verify finds no answer in the label {label!r}")
    return parsed
