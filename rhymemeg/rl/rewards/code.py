"""Code that is judged by running it. Off unless --allow-code-execution; every run is isolated (`rewards.sandbox`)."""

from __future__ import annotations

import re
import secrets
from typing import Any

from rhymemeg.rl.rewards.sandbox import Limits, run

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code_tests(
    response: str,
    label: Any,
    *,
    seconds: float = 5.0,
    memory_mib: int = 1024,
    all_or_nothing: bool = True,
    max_tests: int = 20,
) -> dict[str, float]:
    """Runs the last fenced block of Python of the response against the tests of the label, each in a process of its own
    with `seconds` and `memory_mib`.

    A label is a list of tests: `{"input": ..., "output": ...}`, text for standard input and the expected standard output
    (compared line by line without trailing blanks), or `{"code": ...}`, statements that are run after the response's and
    must not raise. The first `max_tests` count. The score is 1 if all pass, or without `all_or_nothing` the share that
    passes; components: `passed` (that share), `slow` (share that took too long) and `found` (there was a block). Raises
    ValueError for another label, SandboxError where programs cannot be isolated.
    """
    tests = label["tests"] if isinstance(label, dict) and "tests" in label else label
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"code_tests: the label must be a list of tests, got {type(tests).__name__}")
    blocks = _BLOCK.findall(response)
    if not blocks:
        return {"score": 0.0, "passed": 0.0, "slow": 0.0, "found": 0.0}
    limits = Limits(wall_seconds=seconds, cpu_seconds=max(1, int(seconds + 1)), memory_mib=memory_mib)
    passed = slow = 0
    tests = tests[:max_tests]
    for test in tests:
        good, timed_out = _passes(blocks[-1], test, limits)
        passed, slow = passed + good, slow + timed_out
        if all_or_nothing and not good:
            break
    share = passed / len(tests)
    score = float(passed == len(tests)) if all_or_nothing else share
    return {"score": score, "passed": share, "slow": slow / len(tests), "found": 1.0}


def _passes(program: str, test: Any, limits: Limits) -> tuple[bool, bool]:
    if isinstance(test, dict) and isinstance(test.get("code"), str):
        # A program that ends early must not count as one whose assertions hold.
        sentinel = secrets.token_hex(16)
        outcome = run(f"{program}\n{test['code']}\nprint({sentinel!r})\n", b"", limits)
        done = outcome.output.decode(errors="replace").rstrip().endswith(sentinel)
        return outcome.status == 0 and done, outcome.timed_out
    if isinstance(test, dict) and {"input", "output"} <= test.keys():
        outcome = run(program, str(test["input"]).encode(), limits)
        same = _lines(outcome.output.decode(errors="replace")) == _lines(str(test["output"]))
        return outcome.status == 0 and same, outcome.timed_out
    raise ValueError(f"code_tests: a test has `input` and `output`, or `code`; got {test!r}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
