"""Reward 1 for the expected answer, 0 for any other."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

from rhymemeg.rl.rewards.extract import boxed, final_answer, marked, tagged

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
_FIND: dict[str, Callable[[str], str | None]] = {
    "auto": final_answer,
    "none": str,
    "tag": tagged,
    "boxed": boxed,
    "marked": marked,
}


def exact_match(
    response: str,
    label: Any,
    *,
    extract: str = "auto",
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
    numbers: bool = True,
) -> float:
    """1 if the response's final answer equals the label, or one of the labels if it is a list, else 0.

    `extract` says where the answer is: `tag` (<answer>...</answer>), `boxed`, `marked` (`Answer: ...`, `#### ...`),
    `none` (the whole response) or `auto` (the first of these that is there). White space counts as one blank, and
    none at the ends. With `numbers`, numbers of equal value are equal: 1,000 and 1000.0. Labels that are numbers or
    booleans are compared as they are written in JSON. Raises ValueError for a label of another type.
    """
    if extract not in _FIND:
        raise ValueError(f"extract={extract!r}: known are {', '.join(_FIND)}")
    answer = _FIND[extract](response)
    if answer is None:
        return 0.0
    answer = normalise(answer, ignore_case, ignore_punctuation, numbers)
    labels = label if isinstance(label, list | tuple) else [label]
    return float(any(answer == normalise(_as_text(one), ignore_case, ignore_punctuation, numbers) for one in labels))


def _as_text(label: Any) -> str:
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, str | int | float):
        return str(label)
    raise ValueError(f"exact_match compares with text or numbers; this label is {type(label).__name__}: {label!r}")


def normalise(text: str, ignore_case: bool, ignore_punctuation: bool, numbers: bool) -> str:
    """The form in which answers are compared."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    if numbers and text and any(c.isdigit() for c in text) and _NUMBER.fullmatch(text):
        return _plain_number(text)
    if ignore_punctuation:
        text = " ".join("".join(" " if unicodedata.category(c)[0] == "P" else c for c in text).split())
    return text.casefold() if ignore_case else text


def _plain_number(text: str) -> str:
    """A decimal number without separators, needless zeros or plus sign; as text, so that no digit is lost."""
    sign = "-" if text.startswith("-") else ""
    whole, _, fraction = text.lstrip("+-").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return number if number == "0" else sign + number
