"""The drafter inside vLLM: greedy decoding gives the same tokens with any drafts, in fewer steps with good ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rhymemeg.errors import ConfigError
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.proposer import WORKER_EXTENSION, HistoSpecProposer, attach, check_exact, speculative_config
from rhymemeg.rollout.samples import Sample, SampleId

MAX_DRAFT = 8
PROMPTS = {7: [3, 4, 5, 6], 8: [10, 11, 12, 13, 14], 9: [3, 4, 5, 6]}
SIZE = 3


def vllm_config(**changes: Any) -> SimpleNamespace:
    values = {"rejection_sample_method": "standard", "logits_processors": None, "pipeline_parallel_size": 1} | changes
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=MAX_DRAFT, rejection_sample_method=values["rejection_sample_method"]
        ),
        model_config=SimpleNamespace(max_model_len=100, logits_processors=values["logits_processors"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=values["pipeline_parallel_size"]
        ),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejection_sample_method": "synthetic"}, "'synthetic' changes the distribution"),
        ({"logits_processors": ["x"]}, "custom logits processors"),
        ({"pipeline_parallel_size": 2}, "pipeline-parallel"),
    ],
)
def test_refuses_what_is_not_exact(change: dict, message: str) -> None:
    HistoSpecProposer(vllm_config())
    with pytest.raises(ConfigError, match=message):
        HistoSpecProposer(vllm_config(**change))


def test_refuses_sampling_that_verification_ignores() -> None:
    exact = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.0, "logit_bias": None}
    check_exact(SimpleNamespace(**exact))
    for name, value in (("min_p", 0.1), ("logit_bias", {1: 2.0}), ("logits_processors", [print])):
        with pytest.raises(ConfigError, match=f"{name} cannot be combined"):
            check_exact(SimpleNamespace(**(exact | {name: value})))


def test_speculative_config() -> None:
    assert speculative_config(4, 32)["num_speculative_tokens_per_batch_size"] == [(1, 32, 4)]
    with pytest.raises(ConfigError, match="1 to 127"):
        speculative_config(128)


def test_nothing_is_drafted_before_attaching_or_for_others_requests() -> None:
    proposer = HistoSpecProposer(vllm_config())
    tokens = np.zeros((2, 100), np.int32)
    assert proposer.propose([[1], [1]], np.array([5, 5]), tokens) == [[], []]
    batch = SimpleNamespace(req_ids=["score-0-abc", "warmup"], num_prompt_tokens=[4, 4], spec_token_ids=[[], []])
    runner = SimpleNamespace(input_batch=batch, requests={}, drafter=proposer, effective_drafter_max_model_len=100)
    drafter = make_drafter(None)
    attach(runner, drafter)
    assert proposer.propose([[1], [1]], np.array([5, 5]), tokens) == [[], []] and drafter.index.num_open == 0
    with pytest.raises(ConfigError, match="drafts up to 32 tokens, the engine was built for 8"):
        attach(runner, Drafter(DrafterOptions(), None, CostModel.built_in("cpu")))
    with pytest.raises(ConfigError, match="not started with"):
        attach(SimpleNamespace(), drafter)


def test_room_ends_at_the_models_and_the_requests_limit() -> None:
    proposer = HistoSpecProposer(vllm_config())
    history = HistoryBuffer(200)
    history.record(5, [1, 2, 3], [list(range(10, 60))], [1.0], step=0)
    batch = SimpleNamespace(req_ids=["0-5-0-0-x"], num_prompt_tokens=[3], spec_token_ids=[[]])
    runner = SimpleNamespace(input_batch=batch, requests={}, drafter=proposer)
    attach(runner, make_drafter(history, "fixed:8"))
    text = np.array([[1, 2, 3, *range(10, 107)]], np.int32)
    lengths = []
    for limit in (40, 6, 3, 2, 1):
        batch.req_ids = [f"0-5-{limit}-0-x"]
        runner.requests[batch.req_ids[0]] = SimpleNamespace(
            num_prompt_tokens=3, sampling_params=SimpleNamespace(max_tokens=limit)
        )
        lengths.append(len(proposer.propose([[10]], np.array([4]), text)[0]))
    assert lengths == [8, 4, 1, 0, 0], "a draft and its bonus token fit into max_tokens"
    runner.requests.clear()
    batch.req_ids = ["0-5-0-0-x"]
    proposer.max_model_len = 8
    assert len(proposer.propose([[10]], np.array([4]), text)[0]) == 3


def make_drafter(history: HistoryBuffer | None, policy: str = "goodput") -> Drafter:
    drafter = Drafter(DrafterOptions(policy=policy, max_draft=MAX_DRAFT), history, CostModel.built_in("cpu"))
    drafter.load(PROMPTS)
    return drafter


# ------------------------------------------------------------------------------------------------------ a real engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from rhymemeg.arch import ModelArch
    from rhymemeg.rollout.engine import RolloutEngine
    from tests.rollout import tiny

    model: Path = tiny.make_model(tmp_path_factory.mktemp("model"))
    spec = tiny.spec(
        model,
        ModelArch.from_pretrained(str(model)),
        speculative=speculative_config(MAX_DRAFT, 32),
        worker_extension=WORKER_EXTENSION,
        stop_token_ids=(),
    )
    engine = RolloutEngine(spec, tiny.one_rank())
    yield engine
    engine.close()


def generate(engine: Any, step: int, length: int = 64, pause_at: int = 0) -> tuple[dict[tuple[int, int], Sample], int]:
    """Greedy responses of all prompts, and the engine steps that it took."""
    from rhymemeg.rollout.spec import SamplingOptions

    sampling = SamplingOptions(temperature=0.0, max_response_len=length)
    for prompt, ids in PROMPTS.items():
        for i in range(SIZE):
            engine.add(Sample(SampleId(step, prompt, i), tuple(ids)), sampling, seed=i)
    done: dict[tuple[int, int], Sample] = {}
    steps = 0
    while engine.has_unfinished():
        for sample in engine.step().finished:
            done[(sample.sample_id.prompt_id, sample.sample_id.sample_index)] = sample
        steps += 1
        if steps == pause_at:
            for sample in engine.pause():
                engine.add(sample, sampling, seed=99)
        assert steps < 1000
    return done, steps


@pytest.fixture(scope="module")
def plain(engine: Any) -> tuple[dict[tuple[int, int], Sample], int]:
    attach(engine.vllm.model_runner, None)
    return generate(engine, 0)


def same(a: dict[tuple[int, int], Sample], b: dict[tuple[int, int], Sample]) -> None:
    assert a.keys() == b.keys()
    for key, sample in a.items():
        assert sample.response_ids == b[key].response_ids
        np.testing.assert_allclose(sample.log_probs, b[key].log_probs, atol=1e-4)


def history_from(samples: dict[tuple[int, int], Sample], shuffle: bool = False) -> HistoryBuffer:
    history = HistoryBuffer(96)
    rng = np.random.default_rng(0)
    for prompt, ids in PROMPTS.items():
        responses = [sample.response_ids for (p, _), sample in samples.items() if p == prompt]
        if shuffle:
            responses = [rng.integers(0, 96, 200).tolist() for _ in responses]
        history.record(prompt, ids, responses, [1.0] * len(responses), step=0)
    return history


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["goodput", "paper", "fixed:8"])
def test_history_saves_steps_and_changes_nothing(engine: Any, plain: Any, policy: str) -> None:
    drafter = make_drafter(history_from(plain[0]), policy)
    attach(engine.vllm.model_runner, drafter)
    samples, steps = generate(engine, 1)
    same(samples, plain[0])
    metrics = drafter.take_metrics()
    assert metrics["histospec/accepted"] > 0.5 * metrics["histospec/drafted"] > 0
    assert steps < 0.5 * plain[1]
    # Counted by the drafter as by the engine. After a request's last step nothing is drafted, so it is counted too.
    decode_tokens = sum(len(sample.response_ids) - 1 for sample in samples.values())
    assert metrics["histospec/tokens_per_request_step"] * metrics["histospec/request_steps"] == pytest.approx(
        decode_tokens
    )


@pytest.mark.engine
def test_wrong_history_changes_nothing(engine: Any, plain: Any) -> None:
    attach(engine.vllm.model_runner, make_drafter(history_from(plain[0], shuffle=True), "fixed:8"))
    same(generate(engine, 2)[0], plain[0])


@pytest.mark.engine
def test_paused_requests_are_drafted_for_again(engine: Any, plain: Any) -> None:
    drafter = make_drafter(history_from(plain[0]), "fixed:4")
    attach(engine.vllm.model_runner, drafter)
    samples, _ = generate(engine, 3, pause_at=5)
    same(samples, plain[0])
    assert drafter.take_metrics()["histospec/acceptance"] > 0.5


@pytest.mark.engine
@pytest.mark.distributed
def test_ranks_of_an_engine_draft_alike(tmp_path: Path) -> None:
    from tests.rollout import tiny
    from tests.torchrun import torchrun

    folder = tiny.make_model(tmp_path / "model")
    assert "passed" in torchrun(2, "-m", "tests.histospec.check_ranks", str(folder)).check()
