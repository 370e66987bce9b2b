"""Whether a response has the form that it was asked for."""

from __future__ import annotations

import functools
import re
from typing import Any


def format_match(response: str, label: Any, *, pattern: str, whole: bool = True) -> float:
    """1 if the regular expression `pattern` (with `.` for line breaks, too) matches the whole response, or with
    `whole=False` a part of it, else 0. Raises ValueError for a pattern that is none. A pattern may take for ever, so it is
    registered as `isolated`."""
    compiled = _compile(pattern)
    found = compiled.fullmatch(response.strip()) if whole else compiled.search(response)
    return float(found is not None)


@functools.lru_cache(maxsize=64)
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"format_match: {pattern!r} is not a regular expression: {error}") from None
