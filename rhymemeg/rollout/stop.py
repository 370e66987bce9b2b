"""Stop strings, found in the tokens of a response as they come. Pure.

The engine runs without a tokenizer, so it knows stop tokens but not stop strings. `StopStrings.first(tokens, start)`
decodes no more than the end of a response: as many tokens as the longest stop string has UTF-8 bytes, because a token
stands for at least one. A string counts from the token that completes it, also when that token goes beyond it or when
several tokens arrive in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """`decode(list of token ids) -> str` is the tokenizer's; special tokens count as the text they are written as."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = tuple(strings)
        self._decode = tokenizer.decode
        self._window = max(len(text.encode()) for text in strings)

    def _matches(self, tokens: Sequence[int]) -> bool:
        text = self._decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)

    def first(self, tokens: Sequence[int], start: int) -> int | None:
        """Number of tokens up to and including the first one, at index >= `start`, that completes a stop string. Tokens
        before `start` must have been looked at already."""
        if not self._matches(tokens[max(0, start + 1 - self._window) :]):
            return None
        for end in range(start + 1, len(tokens) + 1):
            if self._matches(tokens[max(0, end - self._window) : end]):
                return end
        return None
