"""Weighted sums of rewards, by the source of the prompt. In a YAML file:

    rewards:
      "*":                                        # every source that has no entry of its own
        - auto                                    # the task's own reward, with weight 1
        - {reward: length_penalty, weight: 0.2, args: {free: 200, longest: 400}}
      my_prompts.jsonl:
        - {reward: my_module:quality, weight: 0.5, range: [0, 1]}
        - {reward: format_match, weight: 0.1, name: tags, args: {pattern: "<think>.*</think>.*"}}

The reward is the sum of weight x score; each part's score is logged as `reward/<name>` (its own name unless `name` is
given), and its other components as `reward/<name>/<component>`. `range` is what the part may return; rewards that come
with the package have theirs. Everything that is wrong with an entry is one RewardError before anything is sampled.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymemeg.config import did_you_mean
from rhymemeg.errors import RewardError
from rhymemeg.rl.rewards.judge import check_range, read_value
from rhymemeg.rl.rewards.registry import Reward, RewardFunction, importable, resolve

ANY = "*"
_KEYS = ("reward", "weight", "name", "args", "range")


@dataclass(frozen=True)
class _Part:
    name: str
    weight: float
    call: RewardFunction
    reward: Reward
    limits: tuple[float, float] | None


def weighted_reward(tree: Mapping[str, Any], default_reward: str) -> tuple[Reward, dict[str, Any]]:
    """The reward of the option `rewards` and the arguments to bind it with; `auto` is `default_reward`. It runs apart
    from the training process, and bears time-outs, if one of its parts does."""
    if ANY not in tree and not tree:
        raise RewardError("rewards: no source")
    try:
        text = json.dumps(tree)
    except TypeError as error:
        raise RewardError(f"rewards: {error}") from None
    parts = [part for group in parse(text, default_reward).values() for part in group]
    for part in parts:
        if not importable(part.reward):
            raise RewardError(
                f"rewards: {part.reward.name!r} ({part.reward.location}) cannot be imported by that name: put the function "
                "into a module"
            )
    reward = Reward(
        "rewards",
        weighted_sum,
        "rhymemeg.rl.rewards.mix:weighted_sum",
        isolated=any(p.reward.isolated for p in parts),
        timeout_score=0.0 if any(p.reward.timeout_score is not None for p in parts) else None,
        runs_code=any(p.reward.runs_code for p in parts),
    )
    return reward, {"spec": text, "default_reward": default_reward}


def weighted_sum(
    response: str, label: Any, *, source: str, spec: str, default_reward: str, **info: Any
) -> dict[str, float]:
    """See the module; `spec` is the option as JSON."""
    groups = parse(spec, default_reward)
    parts = groups.get(source, groups.get(ANY))
    if parts is None:
        raise RewardError(f"rewards: nothing for the source {source!r} (there are {', '.join(map(repr, groups))})")
    total: dict[str, float] = {"score": 0.0}
    for part in parts:
        try:
            components = read_value(part.call(response, label, source=source, **info))
        except ValueError as error:
            raise RewardError(f"{part.name!r} returned or raised {error}") from error
        score = components.pop("score")
        if problem := check_range(score, part.limits):
            raise RewardError(f"{part.name!r} {problem.removesuffix(',')}")
        total["score"] += part.weight * score
        total[part.name] = score
        total |= {f"{part.name}/{name}": value for name, value in components.items()}
    return total


@functools.lru_cache(maxsize=8)
def parse(spec: str, default_reward: str) -> dict[str, list[_Part]]:
    """Parts by source. Raises RewardError naming source and entry."""
    groups: dict[str, list[_Part]] = {}
    for source, entries in json.loads(spec).items():
        if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
            raise RewardError(f"rewards: {source!r} must have a list of rewards")
        groups[source] = [_part(entry, f"rewards of {source!r}", default_reward) for entry in entries]
        names = [part.name for part in groups[source]]
        for name in names:
            if names.count(name) > 1 or name == "score":
                raise RewardError(
                    f"rewards of {source!r}: the name {name!r} is taken; give the entry another with `name`"
                )
    return groups


def _part(entry: Any, where: str, default_reward: str) -> _Part:
    if isinstance(entry, str):
        entry = {"reward": entry}
    if not isinstance(entry, dict) or "reward" not in entry:
        raise RewardError(f"{where}: each entry is a name or has `reward`, got {entry!r}")
    for key in entry:
        if key not in _KEYS:
            raise RewardError(f"{where}: unknown key {key!r}{did_you_mean(str(key), _KEYS)}")
    name = default_reward if entry["reward"] == "auto" else entry["reward"]
    weight, arguments, limits = entry.get("weight", 1.0), entry.get("args", {}), entry.get("range")
    if not isinstance(name, str):
        raise RewardError(f"{where}: reward must be a name, got {name!r}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RewardError(f"{where}: the weight of {name!r} must be a number, got {weight!r}")
    if not isinstance(arguments, dict):
        raise RewardError(f"{where}: args of {name!r} must be names and values, got {arguments!r}")
    if limits is not None:
        numbers = isinstance(limits, list) and len(limits) == 2 and all(isinstance(x, int | float) for x in limits)
        if not numbers or limits[0] >= limits[1]:
            raise RewardError(f"{where}: range of {name!r} must be two numbers, the smaller first, got {limits!r}")
        limits = (float(limits[0]), float(limits[1]))
    reward = resolve(name)
    return _Part(entry.get("name", name), float(weight), reward.bound(arguments), reward, limits or reward.range)
