"""Held-out prompt sets: which there are, and what is said of each.

The set of `--eval-prompt-data` (or, with a generator, of `--eval-data-seed`) is the main one; its numbers are `eval/*`.
More sets have names, in a YAML file:

    eval_sets:
      math500: {prompt_data: math500.jsonl, reward: math_verify, n_samples: 4}
      greedy: {prompt_data: task:ledger, num_prompts: 200, data_seed: 77, temperature: 0}

and their numbers are `eval/<name>/*`. An entry takes the options of the section data under their names (those that begin
with `eval_` without it); what it leaves out is as for the main set. Without a main set (prompts from a file, and no
--eval-prompt-data) `eval/reward` is the mean over the sets. `load_held_out` raises ConfigError or DataError naming the set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rhymemeg.config import Config, DataOptions, did_you_mean, first_problem
from rhymemeg.data.prompts import PromptSet, load_prompts
from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.observe.statistics import evaluation_metrics
from rhymemeg.rl.exchange import SampleSummary
from rhymemeg.rl.rewards import Scorer
from rhymemeg.rollout.samples import Prompt

_EVAL = ("prompt_data", "num_prompts", "data_seed", "n_samples", "temperature", "pass_score")
_SHORT = {name: f"eval_{name}" for name in _EVAL}
_OWN = (
    "prompt_key",
    "label_key",
    "source_key",
    "apply_chat_template",
    "reward",
    "reward_args",
    "rewards",
    "reward_range",
)


@dataclass(frozen=True)
class HeldOut:
    """A set with the options that apply to it. `name` is empty for the main one."""

    name: str
    options: DataOptions
    prompts: PromptSet
    scorer: Scorer

    def all_prompts(self) -> list[Prompt]:
        return [self.prompts[i] for i in range(len(self.prompts))]

    def metrics(self, summaries: Sequence[SampleSummary], components: Mapping[str, float]) -> dict[str, float]:
        """The numbers of an evaluation: `components` are means of the reward's, as `reward/<name>`."""
        prefix = f"eval/{self.name}/" if self.name else "eval/"
        renamed = {prefix + name.removeprefix("reward/"): value for name, value in components.items()}
        return renamed | evaluation_metrics(summaries, self.options.eval_pass_score, prefix)


def load_held_out(config: Config, tokenizer: Any) -> list[HeldOut]:
    """All sets, the main one first; none without --eval-interval. Close their scorers."""
    data = config.data
    if not data.eval_interval:
        return []
    sets = set_options(data)
    loaded: list[HeldOut] = []
    name = ""
    try:
        for name, options in sets.items():  # the name is told with the error
            limit = config.rollout.max_prompt_len
            prompts = load_prompts(options, tokenizer, max_prompt_len=limit, evaluation=True)
            scorer = Scorer.from_options(options, prompts.default_reward, options.reward_args)
            loaded.append(HeldOut(name, options, prompts, scorer))
    except RhymeMegError as error:
        for held_out in loaded:
            held_out.scorer.close()
        if not name:
            raise
        raise type(error)(f"eval_sets, {name!r}: {error}") from error
    return loaded


def set_options(data: DataOptions) -> dict[str, DataOptions]:
    """The options of each set, by name. Pure."""
    has_main = bool(data.eval_prompt_data) or data.prompt_data.startswith("task:") or not data.eval_sets
    sets = {"": data} if has_main else {}
    for name, entry in data.eval_sets.items():
        where = f"eval_sets, {name!r}"
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(f"{where}: a name has letters, digits and _.- only")
        if not isinstance(entry, dict) or not entry.get("prompt_data"):
            raise ConfigError(f"{where}: needs prompt_data (a file, or task:NAME)")
        changes: dict[str, Any] = {}
        for key, value in entry.items():
            if key not in _SHORT and key not in _OWN:
                raise ConfigError(f"{where}: unknown option {key!r}{did_you_mean(str(key), [*_SHORT, *_OWN])}")
            changes[_SHORT.get(key, str(key))] = value
        if "reward" in changes or "rewards" in changes:  # in place of whatever judges the training prompts
            base: dict[str, Any] = {"reward": "auto", "reward_args": {}, "rewards": {}, "reward_range": None}
            changes = base | changes
        try:
            options = DataOptions(**(data.model_dump() | {"eval_sets": {}} | changes))
        except ValidationError as error:
            raise ConfigError(f"{where}: {first_problem(error)}") from None
        sets[name] = options
    for name, options in sets.items():
        if options.eval_temperature == 0 and options.eval_n_samples > 1:
            where = (
                f"eval_sets, {name!r}: temperature 0 and n_samples"
                if name
                else "--eval-temperature 0 and --eval-n-samples"
            )
            raise ConfigError(f"{where} {options.eval_n_samples}: greedy responses to a prompt are all alike; sample 1")
    return sets


def combine(parts: Sequence[tuple[HeldOut, dict[str, float]]]) -> dict[str, float]:
    """The numbers of all sets; without a main one, `eval/reward` is the mean over the sets, with its standard error."""
    merged = {name: value for _, metrics in parts for name, value in metrics.items()}
    if parts and "eval/reward" not in merged:
        means = [metrics[f"eval/{held_out.name}/reward"] for held_out, metrics in parts]
        errors = [metrics[f"eval/{held_out.name}/reward_se"] for held_out, metrics in parts]
        merged["eval/reward"] = sum(means) / len(means)
        merged["eval/reward_se"] = math.sqrt(sum(e * e for e in errors)) / len(errors)
    return merged
