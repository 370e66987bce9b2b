"""Finding the final answer in a response. Pure."""

from __future__ import annotations

import re

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARKED = re.compile(
    r"(?:^|\s)(?:####|(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:=]|the\s+(?:final\s+)?answer\s+is)\s*(\S.*)",
    re.IGNORECASE,
)


def tagged(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else None


def boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` (or `\fbox`) holds; braces may nest."""
    end = len(text)
    while True:
        start = max(text.rfind(r"\boxed{", 0, end), text.rfind(r"\fbox{", 0, end))
        if start < 0:
            return None
        depth = 0
        for position in range(text.index("{", start), len(text)):
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                depth -= 1
                if depth == 0:
                    return text[text.index("{", start) + 1 : position].strip()
        end = start


def marked(text: str) -> str | None:
    """The rest of the last line that says `Answer: ...`, `The answer is ...` or `#### ...`, without a closing
    stop."""
    found = None
    for line in text.splitlines():
        if match := _MARKED.search(line):
            found = match.group(1)
    return found.strip().removesuffix(".").strip() if found is not None else None


def final_answer(text: str) -> str:
    r"""The answer that a response ends up with: tagged, else boxed, else marked, else the whole text."""
    for find in (tagged, boxed, marked):
        answer = find(text)
        if answer is not None:
            return answer
    return text.strip()
