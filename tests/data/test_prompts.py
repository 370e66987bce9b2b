"""Prompt files, generators and the order of prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rhymemeg.config import DataOptions
from rhymemeg.data.prompts import HELD_OUT_IDS, PromptSet, batch_at, load_prompts, prompt_order
from rhymemeg.data.tasks.ledger import Ledger
from rhymemeg.errors import ConfigError, DataError, RhymeMegError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: lengths are known, and nothing needs a file."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def write(path: Path, *records: Any) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


# ---------------------------------------------------------------------------------------------------------------- files


def test_jsonl(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", {"q": "One?", "a": 1}, "", {"q": "Zwölf?", "a": ["12", "twelve"]})
    prompts = load_prompts(DataOptions(prompt_data=file, prompt_key="q", label_key="a"), tokenizer, max_prompt_len=16)
    assert len(prompts) == 2 and prompts.default_reward == "exact_match"
    assert [p.text for p in prompts] == ["One?", "Zwölf?"]
    assert [p.label for p in prompts] == [1, ["12", "twelve"]]
    assert [p.prompt_id for p in prompts] == [1, 3]  # the lines' numbers
    assert [len(p.token_ids) for p in prompts] == [4, 7]
    assert prompts[0].source == file


def test_a_line_may_name_its_data_set(tmp_path: Path, tokenizer: Any) -> None:
    lines = ({"prompt": "x", "label": "", "data_source": "gsm8k"}, {"prompt": "y", "label": "", "kind": "aime"})
    file = write(tmp_path / "a.jsonl", *lines)
    assert [p.source for p in load_prompts(DataOptions(prompt_data=file), tokenizer)] == ["gsm8k", file]
    named = load_prompts(DataOptions(prompt_data=file, source_key="kind"), tokenizer)
    assert [p.source for p in named] == [file, "aime"]
    bad = write(tmp_path / "b.jsonl", {"prompt": "x", "label": "", "data_source": 3})
    with pytest.raises(DataError, match=r"b\.jsonl:1: field 'data_source' must be text, got int"):
        load_prompts(DataOptions(prompt_data=bad), tokenizer)


def test_ids_of_the_file_are_kept_and_must_be_unique(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "x", "label": "", "prompt_id": i} for i in (7, 3)]
    assert [p.prompt_id for p in load_prompts(DataOptions(prompt_data=write(tmp_path / "a", *rows)), tokenizer)] == [
        7,
        3,
    ]
    with pytest.raises(DataError, match=r"b:3: prompt_id 7 occurs before, at .*b:1"):
        load_prompts(DataOptions(prompt_data=write(tmp_path / "b", *rows, rows[0])), tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "label": 1', r"a\.jsonl:2: not JSON: .*column"),
        ('["x"]', r"a\.jsonl:2: expected an object with fields, got list"),
        ('{"promt": "x", "label": 1}', r"a\.jsonl:2: no field 'prompt' \(--prompt-key\); there are 'promt', 'label'"),
        ('{"prompt": "x"}', r"a\.jsonl:2: no field 'label' \(--label-key\)"),
        ('{"prompt": 5, "label": 1}', r"a\.jsonl:2: field 'prompt' must be text or a list of chat messages, got int"),
        ('{"prompt": "  ", "label": 1}', r"a\.jsonl:2: field 'prompt' is empty"),
        ('{"prompt": [], "label": 1}', r"a\.jsonl:2: field 'prompt' is empty"),
        ('{"prompt": [{"role": "user"}], "label": 1}', r"a\.jsonl:2: field 'prompt': a chat message needs"),
        ('{"prompt": [{"role": "user", "content": "x"}], "label": 1}', r"a\.jsonl:2: .*--apply-chat-template"),
        ('{"prompt": "x", "label": 1, "prompt_id": 4}', r"a\.jsonl:2: a field 'prompt_id', unlike the lines before"),
        ('{"prompt": "x", "label": 1, "prompt_id": "4"}', r"a\.jsonl:2: field 'prompt_id' must be an integer"),
        (
            '{"prompt": "xxxxxxxxxxxxxxxxxxxxx", "label": 1}',
            r"a\.jsonl:2: the prompt has 21 tokens, --max-prompt-len is 20",
        ),
        ("[" * 100_000, r"a\.jsonl:2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Any, line: str, message: str) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "twenty bytes, it has", "label": 1}, line)
    with pytest.raises(DataError, match=message):
        load_prompts(DataOptions(prompt_data=file), tokenizer, max_prompt_len=20)


def test_bytes_that_are_not_text(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"prompt": "x", "label": 1}\n{"prompt": "\xff", "label": 1}\n')
    with pytest.raises(DataError, match=r"a:2: not UTF-8 text \(byte 13 of the line\)"):
        load_prompts(DataOptions(prompt_data=str(tmp_path / "a")), tokenizer)


def test_files_that_are_no_data(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "bad.parquet").write_text("not parquet")
    for name, message in (
        ("missing.jsonl", "does not exist"),
        (".", "is a folder"),
        ("empty.jsonl", "holds no prompts"),
        ("bad.parquet", "is not a Parquet file"),
    ):
        with pytest.raises(DataError, match=message):
            load_prompts(DataOptions(prompt_data=str(tmp_path / name)), tokenizer)


def test_parquet_is_read_like_jsonl(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"Number {i}?", "label": str(i), "more": i} for i in range(2500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    prompts = load_prompts(DataOptions(prompt_data=str(tmp_path / "a.parquet")), tokenizer, max_prompt_len=64)
    assert len(prompts) == 2500
    assert (prompts[2400].text, prompts[2400].label, prompts[2400].prompt_id) == ("Number 2400?", "2400", 2401)
    with pytest.raises(DataError, match=r"no column 'question' \(--prompt-key\); there are 'prompt', 'label', 'more'"):
        load_prompts(DataOptions(prompt_data=str(tmp_path / "a.parquet"), prompt_key="question"), tokenizer)
    with pytest.raises(DataError, match=r"a.parquet: row 11: the prompt has 10 tokens"):
        load_prompts(DataOptions(prompt_data=str(tmp_path / "a.parquet")), tokenizer, max_prompt_len=9)


def test_parquet_with_a_hole(tmp_path: Path, tokenizer: Any) -> None:
    table = pyarrow.table({"prompt": ["x", None], "label": ["1", "2"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: row 2: field 'prompt' must be text .* got NoneType"):
        load_prompts(DataOptions(prompt_data=str(tmp_path / "a.parquet")), tokenizer)


def test_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = write(tmp_path / "a", {"prompt": messages, "label": 0}, {"prompt": "Hi", "label": 0})
    options = DataOptions(prompt_data=file, apply_chat_template=True)
    with pytest.raises(ConfigError, match="no chat template"):
        load_prompts(options, tokenizer)
    tokenizer.chat_template = TEMPLATE
    try:
        texts = [p.text for p in load_prompts(options, tokenizer)]
    finally:
        tokenizer.chat_template = None
    assert texts == ["<system>Be brief.<user>Hi<assistant>", "<user>Hi<assistant>"]


def test_labels_can_be_done_without(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a", {"prompt": "x"})
    assert load_prompts(DataOptions(prompt_data=file, label_key=""), tokenizer)[0].label is None


def test_fingerprint_follows_the_content(tmp_path: Path, tokenizer: Any) -> None:
    def fingerprint(name: str, *records: Any) -> str:
        return load_prompts(DataOptions(prompt_data=write(tmp_path / name, *records)), tokenizer).fingerprint

    rows = [{"prompt": "x", "label": i} for i in range(3)]
    assert fingerprint("a", *rows) == fingerprint("b", *rows) != fingerprint("c", *reversed(rows))


def test_only_what_may_be_too_long_is_tokenised_at_once(tmp_path: Path, tokenizer: Any) -> None:
    class Counting:
        chat_template = None
        calls = 0

        def __call__(self, texts: list[str], **options: Any) -> Any:
            self.calls += len(texts)
            return tokenizer(texts, **options)

        def num_special_tokens_to_add(self) -> int:
            return 0

    file = write(tmp_path / "a", *({"prompt": "x" * n, "label": 0} for n in (5, 18, 20, 20)))
    counting = Counting()
    load_prompts(DataOptions(prompt_data=file), counting, max_prompt_len=20)
    assert counting.calls == 2


# ----------------------------------------------------------------------------------------------------------- generators


def test_ledger_task(tokenizer: Any) -> None:
    options = DataOptions(prompt_data="task:ledger", num_prompts=200, eval_num_prompts=100, data_seed=5)
    training = load_prompts(options, tokenizer, max_prompt_len=192)
    held_out = load_prompts(options, tokenizer, max_prompt_len=192, evaluation=True)
    assert (len(training), len(held_out), training.default_reward) == (200, 100, "ledger")
    assert [p.prompt_id for p in training] == list(range(200))
    assert [p.prompt_id for p in held_out] == list(range(HELD_OUT_IDS, HELD_OUT_IDS + 100))
    assert all(Ledger.from_label(p.label).prompt == p.text for p in training)
    assert training.fingerprint == load_prompts(options, tokenizer).fingerprint != held_out.fingerprint


def test_held_out_prompts_are_no_training_prompts(tokenizer: Any) -> None:
    """Also with the same seed, where every prompt that is tried first is one."""
    options = DataOptions(
        prompt_data="task:ledger", num_prompts=300, eval_num_prompts=300, eval_data_seed=0, task_args={"max_terms": 2}
    )
    training, held_out = load_prompts(options, tokenizer), load_prompts(options, tokenizer, evaluation=True)
    assert not {p.text for p in training} & {p.text for p in held_out}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_data": "task:leger"}, "unknown task 'leger', did you mean ledger"),
        ({"prompt_data": "task:basic_arithmetics"}, "did you mean basic_arithmetic"),
        (
            {"prompt_data": "task:ledger", "task_args": {"max_term": 3}},
            "no argument 'max_term', did you mean max_terms",
        ),
        ({"prompt_data": "task:ledger", "task_args": {"max_terms": "3"}}, "max_terms must be an integer"),
        ({"prompt_data": "task:ledger", "task_args": {"max_terms": 99}}, "min_terms <= max_terms <= 24"),
        ({"prompt_data": "task:ledger", "task_args": {"min_terms": 1, "max_terms": 1}, "num_prompts": 5000}, "too few"),
        ({"prompt_data": "task:basic_arithmetic", "task_args": {"min_term": 3}}, "did you mean min_terms"),
        ({"prompt_data": "task:basic_arithmetic", "task_args": {"size": 3}}, "size is set by --num-prompts"),
        ({"prompt_data": "task:basic_arithmetic", "task_args": {"min_terms": -3}}, "task:basic_arithmetic refuses"),
    ],
)
def test_tasks_and_arguments_that_do_not_exist(tokenizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RhymeMegError, match=message):
        load_prompts(DataOptions(**options), tokenizer)


def test_reasoning_gym_task(tokenizer: Any) -> None:
    arguments = {"min_terms": 2, "max_terms": 3}
    options = DataOptions(prompt_data="task:basic_arithmetic", num_prompts=20, eval_num_prompts=5, task_args=arguments)
    training, held_out = load_prompts(options, tokenizer), load_prompts(options, tokenizer, evaluation=True)
    assert (len(training), training.default_reward, training.name) == (20, "reasoning_gym", "task:basic_arithmetic")
    first = training[0]
    assert first.text.startswith(first.label["entry"]["question"])
    assert first.label["task"] == "basic_arithmetic" and first.label["task_args"] == arguments
    assert training.fingerprint == load_prompts(options, tokenizer).fingerprint
    assert not {p.text for p in training} & {p.text for p in held_out}


def test_held_out_prompts_of_a_file_need_a_file(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a", {"prompt": "x", "label": 0})
    with pytest.raises(ConfigError, match="--eval-prompt-data"):
        load_prompts(DataOptions(prompt_data=file), tokenizer, evaluation=True)
    other = load_prompts(DataOptions(prompt_data=file, eval_prompt_data="task:ledger"), tokenizer, evaluation=True)
    assert other.default_reward == "ledger" and len(other) == 64


def test_a_prompt_set_has_ends(tokenizer: Any) -> None:
    prompts: PromptSet = load_prompts(DataOptions(prompt_data="task:ledger", num_prompts=2), tokenizer)
    with pytest.raises(IndexError):
        prompts[2]
    assert len(list(prompts)) == 2


# ---------------------------------------------------------------------------------------------------------------- order


@given(st.integers(0, 2**31), st.integers(0, 50), st.integers(1, 200))
def test_an_order_is_a_permutation_that_depends_on_nothing_else(seed: int, epoch: int, n: int) -> None:
    order = prompt_order(seed, epoch, n)
    assert sorted(order) == list(range(n)) and np.array_equal(order, prompt_order(seed, epoch, n))


@given(st.integers(0, 1000), st.integers(1, 24), st.integers(0, 40), st.booleans())
def test_every_prompt_once_an_epoch_and_none_twice_in_a_batch(seed: int, size: int, extra: int, shuffle: bool) -> None:
    n = size + extra
    steps = 5 * n // size + 2
    batches = [batch_at(step, size, seed, shuffle, n) for step in range(steps)]
    assert all(len(set(batch)) == size for batch in batches)
    taken = [i for batch in batches for i in batch]
    for epoch in range(len(taken) // n):
        assert Counter(taken[epoch * n : (epoch + 1) * n]) == Counter(range(n))


@given(st.integers(0, 1000), st.integers(1, 16), st.integers(0, 40), st.integers(0, 60))
def test_a_batch_does_not_depend_on_those_asked_for_before(seed: int, size: int, extra: int, step: int) -> None:
    from rhymemeg.data.prompts import _order

    n = size + extra
    _order.cache_clear()
    alone = batch_at(step, size, seed, True, n)
    for before in range(step):
        batch_at(before, size, seed, True, n)
    assert batch_at(step, size, seed, True, n) == alone


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(prompt_order(seed, epoch, 64)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_without_shuffling_prompts_come_in_order() -> None:
    assert [batch_at(step, 2, 0, False, 5) for step in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_a_batch_of_more_than_all_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rollout-batch-size 6 exceeds the number of prompts, 5"):
        batch_at(0, 6, 0, True, 5)
