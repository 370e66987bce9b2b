"""The shipped quickstart model: it loads, its tokenizer suits the task, and it solves a part of it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymemeg.arch import ModelArch
from rhymemeg.data.tasks.ledger import ledgers, make_ledger, verify, write_solution

FOLDER = Path(__file__).parents[2] / "launch" / "quickstart_model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def test_size() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8 << 20
    arch = ModelArch.from_pretrained(str(FOLDER))
    assert arch.hidden_size == 128 and arch.max_position_embeddings == 1024


def test_every_text_survives_the_tokenizer(tokenizer: Any) -> None:
    rng = random.Random(0)
    for _ in range(50):
        ledger = make_ledger(rng)
        for text in (ledger.prompt, write_solution(ledger, rng).text, "Ünïcödé, 12345 + 678\n\tand more"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id is not None and len(tokenizer) == 384


def test_digits_of_a_number_are_single(tokenizer: Any) -> None:
    assert len(tokenizer.encode("12345")) == 5


def test_long_ledgers_fit_the_quickstart_limits(tokenizer: Any) -> None:
    rng = random.Random(1)
    longest = [ledger for ledger in itertools.islice(ledgers(0), 2000) if len(ledger.changes) == 24]
    assert max(len(tokenizer.encode(ledger.prompt)) for ledger in longest) <= 192
    assert max(len(tokenizer.encode(write_solution(ledger, rng).text)) for ledger in longest) < 448


def test_it_solves_a_part_of_the_tasks(tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tasks = list(itertools.islice(ledgers(5, max_terms=6), 64))
    tokenizer.padding_side = "left"
    prompts = tokenizer([task.prompt for task in tasks], return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=128)
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracy = np.mean([verify(text, task)["accuracy"] for text, task in zip(texts, tasks)])
    assert 0.25 < accuracy < 0.85
