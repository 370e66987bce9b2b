"""Reward functions as a user may write them, good and bad. Imported by tests and, by name, by worker processes."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

import numpy as np

not_a_function = 3


def length(response: str, label: Any) -> float:
    return len(response) / 100


def detailed(response: str, label: Any, *, prompt: str, truncated: bool, weight: float = 1.0) -> dict[str, float]:
    return {"score": weight * len(prompt), "short": float(not truncated)}


def everything(response: str, label: Any, **info: Any) -> float:
    return float(sorted(info) == ["prompt", "prompt_id", "response_len", "source", "truncated"])


def numpy_number(response: str, label: Any) -> Any:
    return np.float32(0.5)


def numpy_bool(response: str, label: Any) -> Any:
    return np.bool_(True)


def prints(response: str, label: Any) -> float:
    print("a reward that prints")
    os.write(1, b"even like this")
    return 1.0


def process(response: str, label: Any) -> float:
    return float(os.getpid())


def heavy_modules(response: str, label: Any) -> float:
    return float(any(name in sys.modules for name in ("torch", "vllm", "megatron", "transformers")))


def raises(response: str, label: Any) -> float:
    return {"a": 1.0}[response]


def exits(response: str, label: Any) -> float:
    sys.exit(0)


def dies(response: str, label: Any) -> float:
    os._exit(3)


def hangs(response: str, label: Any) -> float:
    if response == "hang":
        time.sleep(600)
    return 1.0


def hangs_with_the_interpreter(response: str, label: Any) -> float:
    if response == "hang":
        re.match(r"(a*)*b", "a" * 40)
    return 1.0


def nan(response: str, label: Any) -> float:
    return float("nan")


def infinite_part(response: str, label: Any) -> dict[str, float]:
    return {"score": 1.0, "part": float("inf")}


def text(response: str, label: Any) -> Any:
    return "good"


def nothing(response: str, label: Any) -> Any:
    return None


def no_score(response: str, label: Any) -> Any:
    return {"quality": 1.0}


def array(response: str, label: Any) -> Any:
    return np.zeros(2)


def unsendable(response: str, label: Any) -> Any:
    return lambda: 1


def too_few_parameters(response: str) -> float:
    return 0.0


def too_many_parameters(response: str, label: Any, references: list[str]) -> float:
    return 0.0
