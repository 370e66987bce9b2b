"""Whether drafting changes what is sampled: many responses at fixed weights, with and without, by independent seeds.

    OMP_NUM_THREADS=1 python -m benchmarks.histospec_distribution --model launch/quickstart_model

The same number of responses to each of `--prompts` prompts of the ledger task, once by an engine without speculation and once
with drafts from history (itself sampled beforehand, by a third seed) and from siblings. Compared are, prompt by prompt so that
differences between prompts do not blur anything:

    mean reward, mean length   difference in standard errors; up to 2 is what chance gives 95 times in 100
    frequencies of tokens      chi-squared statistic of the tokens of all responses. Tokens of a response depend on each other,
                               so its distribution under equality is found by exchanging whole responses of a prompt between
                               the two sides, `--permutations` times; printed is the share that are at least as far apart

`--other-temperature` draws the side with drafts at another temperature, to see what the comparison can see.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.histospec_rollout import MAX_DRAFT, Arm, HistoSpecArm, Responses, queue_of, set_up, start_engine

Floats = NDArray[np.float64]


def standard_errors(a: Floats, b: Floats) -> float:
    """Difference of the means of [prompts, samples] values, in its standard errors: within prompts only."""
    variance = (a.var(1, ddof=1) / a.shape[1] + b.var(1, ddof=1) / b.shape[1]).sum() / a.shape[0] ** 2
    return float((b.mean() - a.mean()) / math.sqrt(variance)) if variance > 0 else 0.0


def chi_squared(a: Floats, b: Floats) -> Floats:
    """Two-sample statistic of counts [..., V]; both sides as long as each other on average."""
    total = a + b
    share = a.sum(-1, keepdims=True) / total.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nansum((a - share * total) ** 2 / (share * (1 - share) * total), axis=-1)


def permutation_p_value(a: Floats, b: Floats, permutations: int) -> float:
    """Share of permutations whose statistic is at least the observed one; counts [prompts, samples, V]."""
    rng = np.random.default_rng(0)
    both = np.concatenate([a, b], 1)
    prompts, samples, vocab = both.shape
    flat = both.reshape(-1, vocab)
    total = flat.sum(0)
    observed = chi_squared(a.sum((0, 1)), b.sum((0, 1)))
    at_least = 1
    for _ in range(0, permutations, 100):
        side = np.zeros((100, prompts, samples))
        order = rng.random(side.shape).argsort(-1)
        np.put_along_axis(side, order[..., : samples // 2], 1.0, -1)
        left = side.reshape(100, -1) @ flat
        at_least += int((chi_squared(left, total - left) >= observed).sum())
    return at_least / (permutations + 1)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="launch/quickstart_model", help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=125)
    parser.add_argument("--samples", type=int, default=32, help="responses a prompt and side")
    parser.add_argument("--running", type=int, default=64, help="requests running at a time")
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--other-temperature", type=float, help="temperature of the side with drafts")
    parser.add_argument("--permutations", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from rhymemeg.data.tasks.ledger import verify
    from rhymemeg.histospec.proposer import WORKER_EXTENSION, speculative_config
    from rhymemeg.rollout.samples import Sample
    from rhymemeg.rollout.spec import SamplingOptions

    prompts, tokenizer, spec = set_up(args.model, args.prompts, args.running, 0.5)
    sampling = SamplingOptions(temperature=args.temperature, max_response_len=spec.max_response_len)
    other = replace(sampling, temperature=args.other_temperature or args.temperature)
    plain = Arm("without", start_engine(spec))
    history: Responses = {}
    queue = queue_of(prompts, 8, 0)
    plain.run(queue, sampling, 1, args.running)
    for sample in queue:
        history.setdefault(sample.sample_id.prompt_id, []).append(sample.response_ids)
    drafting = speculative_config(MAX_DRAFT, args.running)
    engine = start_engine(replace(spec, speculative=drafting, worker_extension=WORKER_EXTENSION))
    drafted = HistoSpecArm("with", engine, prompts, history, args.policy, True, "")

    labels = {p.prompt_id: p.label for p in prompts}
    rewards: list[Floats] = []
    lengths: list[Floats] = []
    counts: list[Floats] = []
    metrics: dict[str, float] = {}
    for seed, (arm, how) in enumerate(((plain, sampling), (drafted, other)), 2):
        queue = queue_of(prompts, args.samples, seed)
        metrics |= arm.run(queue, how, seed, args.running).metrics

        def table(values: list[float], shape: tuple[int, ...] = (args.prompts, args.samples)) -> Floats:
            return np.array(values).reshape(shape)

        def reward(sample: Sample) -> float:
            text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
            return verify(text, labels[sample.sample_id.prompt_id])["score"]

        rewards.append(table([reward(s) for s in queue]))
        lengths.append(table([len(s.response_ids) for s in queue]))
        width = spec.arch.vocab_size
        tokens = [np.bincount(s.response_ids, minlength=width).astype(float) for s in queue]
        counts.append(np.stack(tokens).reshape(args.prompts, args.samples, width))
    result = {
        "samples": args.prompts * args.samples,
        "reward_without": float(rewards[0].mean()),
        "reward_with": float(rewards[1].mean()),
        "reward_standard_errors": standard_errors(*rewards),
        "length_without": float(lengths[0].mean()),
        "length_with": float(lengths[1].mean()),
        "length_standard_errors": standard_errors(*lengths),
        "token_p_value": permutation_p_value(counts[0], counts[1], args.permutations),
        "tokens_per_request_step": metrics["histospec/tokens_per_request_step"],
        "drafted": metrics["histospec/drafted"],
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<26} {value:>12.4f}")
    plain.engine.close()
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
