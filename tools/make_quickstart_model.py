"""Make the quickstart model: a small Qwen3 and its tokenizer, warmed up on flawed worked solutions of the ledger
task.

    python tools/make_quickstart_model.py --output launch/quickstart_model

The tokenizer is a byte-level BPE of 384 entries in which the digits of a number stay single. The model (4 layers,
hidden 128, 0.9M parameters, float32) is trained by AdamW on solutions written by
`rhymemeg.data.tasks.ledger.write_solution`, flaws included, on prompts of a seed of its own. Then it is sampled on
held-out prompts, and what it can do is printed: accuracy by number of terms, the share of each flaw, lengths. One
thread and fixed seeds: the same machine and library versions make the same model. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rhymemeg.data.tasks.ledger import MAX_TERMS, Ledger, ledgers, make_ledger, random_ledger, verify, write_solution

END, PAD = "<|endoftext|>", "<|pad|>"
VOCABULARY = 384
MAX_RESPONSE = 448
MEDIAN_TERMS = 5.0  # fewer than the task has: short ledgers teach more a token, and long ones get batches of their own
ENGLISH = (
    "The question asks for the number that is left when every change in the list has been made. First write "
    "down where it begins, then work through the list from left to right, one change at a time, and keep the "
    "result of each for the next. There are other ways to do this, but with this one nothing is forgotten and "
    "each line can be checked by the reader."
)


# -------------------------------------------------------------------------------------------------------- tokenizer


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE learned from prompts and solutions. Digits are never merged, so a number is read digit by
    digit."""
    rng = random.Random(f"tokenizer/{seed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A word keeps the blank before it, a change of one digit its sign; a digit or a mark stands alone.
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[+-][0-9]|[0-9]|\s+|[^A-Za-z0-9\s]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(rng, 4000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def _texts(rng: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        ledger = make_ledger(rng, median=MEDIAN_TERMS)
        yield ledger.prompt
        yield write_solution(ledger, rng).text
    yield from [ENGLISH] * 20  # for the merges that are left over


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.06,  # the usual 0.02 suits wide models; one of width 128 learns half as fast from it
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


# --------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps of `tokens` each. The learning rate rises for `warmup` steps to `peak`, stays, and falls
    linearly to `last` over the final `falling` of the steps; the longest ledger grows from 4 changes to 24 over the
    first `growing`."""

    steps: int = 1600
    tokens: int = 2048
    warmup: int = 60
    peak: float = 1.2e-3
    last: float = 5e-5
    falling: float = 0.6
    growing: float = 0.3

    def lr(self, step: int) -> float:
        left = (self.steps - step) / (self.falling * self.steps)
        return min(self.peak * (step + 1) / self.warmup, self.last + (self.peak - self.last) * min(1.0, left))

    def longest(self, step: int) -> int:
        return min(MAX_TERMS, 4 + round((MAX_TERMS - 4) * step / (self.growing * self.steps)))


def training_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, tokens: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded [rows, length] inputs and targets of about `tokens` tokens, padding included. Only responses and
    their end are learned (-100 elsewhere). Rows are of one length class, so little is padding."""
    draw = make_ledger(rng, max_terms=longest, median=MEDIAN_TERMS)
    # One batch in four is of any length with equal chance: long ledgers are rare otherwise.
    count = rng.randint(1, longest) if rng.random() < 0.25 else len(draw.changes)
    rows: list[tuple[list[int], int]] = []
    width = 0
    while True:
        ledger = random_ledger(rng, max(1, min(longest, count + rng.randint(-1, 1))))
        prompt = tokenizer.encode(ledger.prompt)
        answer = tokenizer.encode(write_solution(ledger, rng).text)
        row = [*prompt, *answer, tokenizer.eos_token_id]
        width = max(width, len(row))
        if rows and width * (len(rows) + 1) > tokens:
            break
        rows.append((row, len(prompt)))
    width = max(len(row) for row, _ in rows)
    inputs = torch.full((len(rows), width - 1), tokenizer.pad_token_id)
    targets = torch.full((len(rows), width - 1), -100)
    for i, (row, prompt_len) in enumerate(rows):
        inputs[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, prompt_len - 1 : len(row) - 1] = torch.tensor(row[prompt_len:])
    return inputs, targets


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, seed: int) -> None:
    """Warm up `model` in place. Right padding needs no mask: attention is causal and padding is not learned."""
    rng = random.Random(f"warm-up/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.peak, betas=(0.9, 0.98), weight_decay=0.01)
    began, losses = time.monotonic(), []
    for step in range(schedule.steps):
        inputs, targets = training_batch(tokenizer, rng, schedule.tokens, schedule.longest(step))
        logits = model(inputs).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - began
            print(f"step {step + 1}: loss {np.mean(losses[-100:]):.4f}, {seconds:.0f} s", flush=True)


# -------------------------------------------------------------------------------------------------------- measuring


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], limit: int = MAX_RESPONSE
) -> list[list[int]]:
    """One response to each prompt at temperature 1, as token ids without the end."""
    tokenizer.padding_side = "left"
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False)
    out = model.generate(**batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=limit)
    responses = []
    for row in out[:, batch["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else limit
        responses.append(row[:end])
    return responses


def describe(tasks: Sequence[Ledger], responses: Sequence[list[int]], texts: Sequence[str]) -> dict[str, Any]:
    """What the responses are like: scores by number of terms, habits, lengths."""
    grades = [verify(text, task) for text, task in zip(texts, tasks)]
    lengths = np.array([len(r) for r in responses])
    by_terms: dict[str, list[float]] = defaultdict(list)
    names = ["1-3", "4-5", "6-8", "9-12", "13-18", "19-24"]
    bounds = [int(name.split("-")[1]) for name in names]
    for task, grade in zip(tasks, grades):
        by_terms[names[bisect.bisect_left(bounds, len(task.changes))]].append(grade["accuracy"])
    steps = [len(re.findall(r"[b-z][+-][0-9]:", text)) for text in texts]

    def mean(values: Sequence[float] | np.ndarray) -> float:
        return round(float(np.mean(values)), 4)

    return {
        "samples": len(tasks),
        **{name: mean([grade[name] for grade in grades]) for name in ("score", "accuracy", "progress", "format")},
        "accuracy_by_terms": {name: mean(by_terms[name]) for name in names if by_terms[name]},
        "share_careful": mean([text.startswith("Start") for text in texts]),
        "share_too_few_steps": mean([made < len(task.changes) for made, task in zip(steps, tasks)]),
        "length_p10_p50_p90_max": [int(length) for length in np.percentile(lengths, [10, 50, 90, 100])],
        "share_truncated": mean(lengths >= MAX_RESPONSE),
    }


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> dict[str, Any]:
    """Sample held-out prompts and describe the responses."""
    torch.manual_seed(seed)
    tasks = list(itertools.islice(ledgers(seed=1_000_003), count))
    responses: list[list[int]] = []
    for i in range(0, count, 128):
        responses += sample(model, tokenizer, [task.prompt for task in tasks[i : i + 128]])
    return describe(tasks, responses, [tokenizer.decode(r) for r in responses])


# ------------------------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the quickstart model and its tokenizer.")
    parser.add_argument("--output", required=True, help="Folder to write; existing files of the model are replaced.")
    parser.add_argument("--steps", type=int, default=Schedule.steps, help="Optimizer steps (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=7, help="Seed of everything (default: %(default)s).")
    parser.add_argument("--eval-prompts", type=int, default=512, help="Held-out prompts to measure on.")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(args.seed)
    model = make_model(tokenizer, args.seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    model.train()
    train(model, tokenizer, Schedule(steps=args.steps), args.seed)
    model.eval()
    output = Path(args.output)
    model.save_pretrained(output)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(output)
    print(json.dumps(measure(model, tokenizer, args.eval_prompts, args.seed), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
