"""The prompts of a run, and the order in which steps take them.

`load_prompts` makes a `PromptSet` of `--prompt-data`: a JSONL or Parquet file, or `task:NAME` for a generator. Every
line is checked at once, and what is wrong is one DataError with file and line: not JSON, a missing field, a wrong
type, an empty prompt, a prompt of too many tokens, an id that occurs twice. Prompts are tokenised when they are used,
except those so long that they might exceed the limit.

Ids are stable and unique: the field `prompt_id` of the lines if they have it, else the number of the line (or Parquet
row), from 1, or the index in the generator, from 0. Held-out prompts have theirs shifted by `HELD_OUT_IDS`, so that
they are never taken for training prompts.

Orders are pure functions of seed, epoch and number of prompts: each prompt comes exactly once an epoch, batches go on
across the border of epochs, and no batch has a prompt twice. `PromptSet.fingerprint` tells whether two ranks, or a
run and the one that it resumes, have the same prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rhymemeg.config import DataOptions
from rhymemeg.data.sources import MAX_ID, Fields, Row, Source, file_source, task_source
from rhymemeg.errors import ConfigError, DataError
from rhymemeg.rollout.samples import Prompt

HELD_OUT_IDS = MAX_ID + 1


class PromptSet(Sequence[Prompt]):
    """Prompts by index. `default_reward` is the reward that suits them (for `--reward auto`).

    `tokenizer` is a Hugging Face tokenizer. With `chat`, prompts go through its chat template, plain text as the
    message of a user. Raises DataError for the first prompt of more than `max_prompt_len` tokens.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Any,
        *,
        chat: bool = False,
        max_prompt_len: int | None = None,
        first_id: int = 0,
    ) -> None:
        if chat and not tokenizer.chat_template:
            raise ConfigError("--apply-chat-template: the tokenizer has no chat template")
        self.name, self.default_reward, self.fingerprint = source.name, source.default_reward, source.fingerprint
        self._source, self._tokenizer, self._chat, self._first_id = source, tokenizer, chat, first_id
        if max_prompt_len is not None:
            self._check_lengths(max_prompt_len)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        row = self._source.row(index)
        text = self._text(row)
        return Prompt(
            row.prompt_id + self._first_id, text, tuple(self._encode([text])[0]), row.label, row.source or self.name
        )

    def prompt_id(self, index: int) -> int:
        """The id of a prompt, without tokenising it."""
        return self._source.row(index).prompt_id + self._first_id

    def _text(self, row: Row) -> str:
        if not self._chat:
            assert isinstance(row.prompt, str)
            return row.prompt
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like, for example when roles do not alternate
            raise DataError(f"{row.place}: the chat template refuses these messages: {error}") from None
        assert isinstance(text, str)
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids. A chat template writes the special tokens itself; elsewhere the tokenizer adds those that begin
        a text."""
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=not self._chat)["input_ids"]
        return ids

    def _check_lengths(self, limit: int) -> None:
        """A token stands for at least one byte, so a text of few bytes needs no tokenising to be short enough. One
        byte more is for the blank that SentencePiece puts in front."""
        added = 0 if self._chat else self._tokenizer.num_special_tokens_to_add()
        for texts, places in self._chunks(byte_limit=limit - added - 1):
            for ids, place in zip(self._encode(texts), places):
                if len(ids) > limit:
                    raise DataError(f"{place}: the prompt has {len(ids)} tokens, --max-prompt-len is {limit}")

    def _chunks(self, byte_limit: int, size: int = 256) -> Iterator[tuple[list[str], list[str]]]:
        texts: list[str] = []
        places: list[str] = []
        for row in self._source.rows():
            text = self._text(row)
            if len(text.encode("utf-8", "surrogatepass")) > byte_limit:
                texts.append(text)
                places.append(row.place)
            if len(texts) == size:
                yield texts, places
                texts, places = [], []
        if texts:
            yield texts, places


def load_prompts(
    options: DataOptions, tokenizer: Any, *, max_prompt_len: int | None = None, evaluation: bool = False
) -> PromptSet:
    """The training prompts, or the held-out ones. Held-out prompts of a generator are none of the training
    prompts."""
    training = functools.partial(_source, options, options.prompt_data, options.num_prompts, options.data_seed)
    if not evaluation:
        source = training()
    else:
        name = options.eval_prompt_data or options.prompt_data
        if name == options.prompt_data and not name.startswith("task:"):
            raise ConfigError("--eval-prompt-data is required: held-out prompts cannot be generated from a file")
        unlike = training() if name == options.prompt_data else None
        source = _source(options, name, options.eval_num_prompts, options.eval_data_seed, unlike)
    return PromptSet(
        source,
        tokenizer,
        chat=options.apply_chat_template,
        max_prompt_len=max_prompt_len,
        first_id=HELD_OUT_IDS if evaluation else 0,
    )


def _source(options: DataOptions, name: str, count: int, seed: int, unlike: Source | None = None) -> Source:
    if name.startswith("task:"):
        # Arguments belong to the task of --prompt-data; another task that is evaluated has its defaults.
        arguments = options.task_args if name == options.prompt_data else {}
        return task_source(name.removeprefix("task:"), count, seed, arguments, unlike)
    return file_source(
        name, Fields(options.prompt_key, options.label_key, options.apply_chat_template, options.source_key)
    )


# ------------------------------------------------------------------------------------------------------------ order


def prompt_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """A permutation of range(n), int64, for one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def batch_at(step: int, batch_size: int, seed: int, shuffle: bool, n: int) -> list[int]:
    """Indices of the prompts of a step, 0-based, all different. The batches of steps 0, 1, ... one after the other
    are the epochs one after the other. Raises ConfigError if there are fewer prompts than a batch takes."""
    if batch_size > n:
        raise ConfigError(f"--rollout-batch-size {batch_size} exceeds the number of prompts, {n}")
    first = step * batch_size
    positions = range(first, first + batch_size)
    if not shuffle:
        return [position % n for position in positions]
    return [int(_order(seed, position // n, n, batch_size)[position % n]) for position in positions]


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, n: int, batch_size: int) -> np.ndarray:
    """The order of an epoch: `prompt_order`, except that prompts which the batch across the border already has from
    the end of the epoch before are moved back until just after that batch.

    The change reaches no further than position `batch_size`, so with two batches or more an epoch's end is as
    `prompt_order` has it. With less than two, the end depends on the epochs before, and they are gone through one by
    one.
    """
    begun = epoch * n % batch_size  # prompts that the batch across the border has from the epoch before
    order = prompt_order(seed, epoch, n)
    if begun == 0:
        return order
    if n >= 2 * batch_size:
        before = prompt_order(seed, epoch - 1, n)
    else:
        first = epoch - 1
        while first * n % batch_size:
            first -= 1  # back to an epoch that begins with a batch: it depends on no other
        before = prompt_order(seed, first, n)
        for e in range(first + 1, epoch):
            before = _moved(prompt_order(seed, e, n), before, e * n % batch_size, batch_size)
    return _moved(order, before, begun, batch_size)


def _moved(order: np.ndarray, before: np.ndarray, begun: int, batch_size: int) -> np.ndarray:
    """`order` with the prompts of `before[-begun:]` moved back behind the first `batch_size - begun`, others kept in
    order."""
    clash = np.isin(order, before[-begun:])
    head = np.flatnonzero(~clash)[: batch_size - begun]
    rest = np.delete(order, head)
    return np.concatenate([order[head], rest])
