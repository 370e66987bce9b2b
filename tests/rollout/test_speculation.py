"""The engine with speculative decoding: several tokens a step, and the same distribution as without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rhymemeg.arch import ModelArch
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.samples import Sample, SampleId
from rhymemeg.rollout.window import run_samples
from tests.rollout import tiny

pytestmark = pytest.mark.engine

SPECULATIVE = {"method": "custom_class", "model": "tests.rollout.drafter.RepeatDrafter", "num_speculative_tokens": 5}
# Few tokens, so that the drafts are right often and wrong often.
PROMPTS = [(2, 3, 4, 2, 3, 4, 2, 3), (5, 5, 6, 5, 5, 6, 5), (9, 8, 7)]


class Letters:
    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(ord("A") + i) for i in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself: its output layer is its embedding."""
    return tiny.make_model(tmp_path_factory.mktemp("models") / "tied", tie=True)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[RolloutEngine, RolloutEngine]]:
    """Without and with speculation."""
    arch = ModelArch.from_pretrained(folder)
    spec = tiny.spec(folder, arch, stop_token_ids=())
    plain = RolloutEngine(spec, tiny.one_rank(), Letters())
    speculative = RolloutEngine(replace(spec, speculative=SPECULATIVE), tiny.one_rank(), Letters())
    yield plain, speculative
    speculative.close()
    plain.close()


def samples(n: int = 2) -> list[Sample]:
    return [Sample(SampleId(0, p, i), prompt) for p, prompt in enumerate(PROMPTS) for i in range(n)]


def run(engine: RolloutEngine, todo: list[Sample], sampling: SamplingOptions, seed: int = 0) -> list[Sample]:
    return run_samples(engine, todo, sampling, seed, timeout=120)


Engines = tuple[RolloutEngine, RolloutEngine]


def test_greedy_is_the_same_in_fewer_steps(engines: Engines) -> None:
    sampling = SamplingOptions(temperature=0.0, max_response_len=60)
    plain, speculative = (run(engine, samples(), sampling) for engine in engines)
    for a, b in zip(plain, speculative):
        assert a.response_ids == b.response_ids and len(b.versions) == len(b.response_ids)
        assert torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4)
    todo, steps = samples(), 0
    for sample in todo:
        engines[1].add(sample, sampling, 0)
    while engines[1].has_unfinished():
        engines[1].step()
        steps += 1
    assert steps < 60


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_log_probs(engines: Engines, folder: Path, temperature: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    for s in run(engines[1], samples(), SamplingOptions(temperature=temperature, max_response_len=60)):
        tokens = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(s.prompt_ids) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(s.log_probs), expected, atol=1e-4)


def test_sampled_responses_have_the_same_distribution(engines: Engines) -> None:
    """Counts of the tokens at each of the first positions, with and without drafts (chi-squared, two samples). Groups
    share their prompt, whose blocks but for one token come from the prefix cache: that is where vLLM puts
    placeholders."""
    n, length = 1500, 6
    prompt = tuple([2, 3, 4] * 11)[:33]  # one block and one token
    counts = []
    for number, engine in enumerate(engines):
        todo = [Sample(SampleId(0, 0, i), prompt) for i in range(n)]
        done = run(engine, todo, SamplingOptions(temperature=1.0, max_response_len=length), seed=number)
        table = torch.zeros(length, tiny.VOCAB)
        for sample in done:
            table[torch.arange(length), torch.tensor(sample.response_ids)] += 1
        counts.append(table)
    for position in range(length):
        a, b = (table[position] for table in counts)
        common = a + b >= 20
        a, b = (torch.cat([x[common], x[~common].sum().view(1)]).double() for x in (a, b))
        a, b = a[a + b > 0], b[a + b > 0]
        statistic = ((a - b) ** 2 / (a + b)).sum()
        p_value = float(torch.special.gammaincc(torch.tensor((len(a) - 1) / 2).double(), statistic / 2))
        assert p_value > 1e-5, (position, p_value)


def test_stop_strings_cut_what_comes_after(engines: Engines) -> None:
    free = run(engines[1], samples(1)[:1], SamplingOptions(temperature=0.0, max_response_len=30))[0]
    text = Letters().decode(free.response_ids)
    for at in range(3, 12):
        stop = text[at - 2 : at]
        end = text.index(stop) + 2
        sampling = SamplingOptions(temperature=0.0, max_response_len=30, stop=(stop,))
        cut = run(engines[1], samples(1)[:1], sampling)[0]
        assert cut.response_ids == free.response_ids[:end] and cut.finish_reason == "stop"
        assert len(cut.log_probs) == len(cut.versions) == end


def test_lengths_are_exact_and_pauses_resume(engines: Engines) -> None:
    sampling = SamplingOptions(temperature=0.0, max_response_len=23)
    expected = run(engines[0], samples(1), sampling)
    todo = samples(1)
    for sample in todo:
        engines[1].add(sample, sampling, 0)
    for _ in range(3):
        engines[1].step()
    run(engines[1], engines[1].pause(), sampling)
    assert [s.response_ids for s in todo] == [s.response_ids for s in expected]
    assert all(len(s.response_ids) == 23 and s.truncated for s in todo)
