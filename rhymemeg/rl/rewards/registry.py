"""Rewards by name.

A reward is a function

    fn(response: str, label, **info) -> float | dict[str, float]

of the response's text and the prompt's label. `info` has `prompt` (its text), `prompt_id`, `source` (as
`task:ledger`), `response_len` (in tokens) and `truncated` (the response ran into its limit); a function that takes fewer
of them by name gets those. A dict must have `score`, which is the reward; its other entries are logged as
`reward/<name>`.

`resolve` finds a reward by the name given to `--reward`: one of `known_rewards()`, one that was added by

    @register("shortness", range=(0.0, 1.0))
    def shortness(response, label): ...

or `module:function` for a function of the user's. Built-in rewards are imported when they are first resolved. Raises
RewardError for everything that is wrong with the name, the module or the function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rhymemeg.config import did_you_mean
from rhymemeg.errors import RewardError

RewardFunction = Callable[..., Any]
INFO = ("prompt", "prompt_id", "source", "response_len", "truncated")
Range = tuple[float, float]


@dataclass(frozen=True)
class Reward:
    """A resolved reward. `location` is `module:function`, from which another process can import it. With `isolated`
    it must not run in the training process (it may hang in a way that no thread can interrupt). A response on which
    it takes too long gets `timeout_score`, where one is set, instead of ending the run. A reward outside of `range` ends
    the run. `runs_code`: it executes what the model writes, and is off unless allowed."""

    name: str
    function: RewardFunction
    location: str
    isolated: bool = False
    timeout_score: float | None = None
    range: Range | None = None
    runs_code: bool = False

    def bound(self, arguments: Mapping[str, Any]) -> RewardFunction:
        """The function as `fn(response, label, **info)`, with `arguments` fixed and the infos that it does not take
        left out. Raises RewardError if it does not take an argument, or needs something that it will not get."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # some built-in callables have none: call them with the two arguments
            return lambda response, label, **_: self.function(response, label, **arguments)
        parameters = signature.parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        for argument in arguments:
            if not takes_all and argument not in named:
                options = sorted(named - {"response", "label", *INFO})
                raise RewardError(
                    f"reward {self.name!r} takes no argument {argument!r}{did_you_mean(argument, options)}"
                )
        taken = tuple(INFO if takes_all else (name for name in INFO if name in named))
        try:
            signature.bind("", None, **dict.fromkeys(taken), **arguments)
        except TypeError as error:
            raise RewardError(
                f"reward {self.name!r} ({self.location}) cannot be called as fn(response, label, **info): {error}"
            ) from None

        def call(response: str, label: Any, **info: Any) -> Any:
            return self.function(response, label, **{name: info[name] for name in taken}, **arguments)

        return functools.update_wrapper(call, self.function)


@dataclass(frozen=True)
class _Builtin:
    """Where a built-in reward lives, and which package it needs besides."""

    location: str
    isolated: bool = False
    timeout_score: float | None = None
    range: Range | None = (0.0, 1.0)
    runs_code: bool = False


_BUILTIN: dict[str, _Builtin] = {
    "ledger": _Builtin("rhymemeg.data.tasks.ledger:verify"),
    "exact_match": _Builtin("rhymemeg.rl.rewards.exact_match:exact_match"),
    "reasoning_gym": _Builtin("rhymemeg.rl.rewards.reasoning_gym:score_answer"),
    # Comparing formulas may take for ever inside of sympy; a response that cannot be judged is not a right one.
    "math_verify": _Builtin("rhymemeg.rl.rewards.math:math_verify", isolated=True, timeout_score=0.0),
    "format_match": _Builtin("rhymemeg.rl.rewards.format:format_match", isolated=True, timeout_score=0.0),
    "length_penalty": _Builtin("rhymemeg.rl.rewards.length:length_penalty", range=(-1.0, 0.0)),
    "code_tests": _Builtin("rhymemeg.rl.rewards.code:code_tests", isolated=True, timeout_score=0.0, runs_code=True),
}
_REGISTERED: dict[str, Reward] = {}


def register(
    name: str, *, isolated: bool = False, timeout_score: float | None = None, range: Range | None = None
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that adds a reward under `name`. See `Reward` for the options."""

    def add(function: RewardFunction) -> RewardFunction:
        if ":" in name or name == "auto":
            raise RewardError(f"a reward cannot be called {name!r}: that form is taken")
        if name in _BUILTIN or (name in _REGISTERED and _REGISTERED[name].location != _location(function)):
            raise RewardError(f"a reward called {name!r} exists already")
        _REGISTERED[name] = Reward(name, function, _location(function), isolated, timeout_score, range)
        return function

    return add


def known_rewards() -> list[str]:
    """Names that `resolve` knows, besides `module:function`."""
    return sorted({*_BUILTIN, *_REGISTERED})


def resolve(name: str) -> Reward:
    """The reward called `name`. Imports it."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in _BUILTIN:
        found = _BUILTIN[name]
        return Reward(
            name,
            load(found.location, name),
            found.location,
            found.isolated,
            found.timeout_score,
            found.range,
            found.runs_code,
        )
    if ":" in name:
        return Reward(name, load(name, name), name)
    raise RewardError(
        f"--reward: unknown reward {name!r}{did_you_mean(name, known_rewards())}; or give module:function"
    )


def load(location: str, name: str) -> RewardFunction:
    """Import `module:function` (dots allowed in the second part). `name` is what the user called it."""
    module_name, _, path = location.partition(":")
    if not module_name or not path:
        raise RewardError(f"--reward {name}: expected module:function")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        hint = " (is its folder in PYTHONPATH?)" if module_name.startswith(missing) else f", needed by {module_name}"
        raise RewardError(f"--reward {name}: no module named {missing!r}{hint}") from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever the user's module raises when it is imported, sys.exit included
        raise RewardError(f"--reward {name}: importing {module_name} raised {describe_error(error)}") from error
    for part in path.split("."):
        if not hasattr(target, part):
            functions = (
                [key for key, value in vars(target).items() if callable(value)] if hasattr(target, "__dict__") else []
            )
            where = getattr(target, "__name__", module_name)
            hint = did_you_mean(part, functions) if functions else ""
            raise RewardError(f"--reward {name}: {where} has no {part!r}{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise RewardError(f"--reward {name}: {location} is not a function but {type(target).__name__}")
    function: RewardFunction = target
    return function


def importable(reward: Reward) -> bool:
    """Whether another process finds this very function under `reward.location`."""
    module_name, _, path = reward.location.partition(":")
    target: Any = sys.modules.get(module_name)
    for part in path.split("."):
        target = getattr(target, part, None)
    return module_name != "__main__" and target is reward.function


def _location(function: RewardFunction) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name}"


def describe_error(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, the place being the innermost one of the traceback."""
    place, step = "", error.__traceback__
    while step is not None:
        place, step = f" ({step.tb_frame.f_code.co_filename}:{step.tb_lineno})", step.tb_next
    text = str(error)
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"
