"""One engine in this process: against transformers, and against itself under other circumstances."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.errors import RolloutError, WeightSyncError
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.samples import Sample, SampleId, sample_seed
from rhymemeg.rollout.window import Progress, run_samples
from tests.rollout import tiny

pytestmark = pytest.mark.engine

GREEDY = SamplingOptions(temperature=0.0, max_response_len=40)
SAMPLED = SamplingOptions(max_response_len=40)


class Letters:
    """A tokenizer of one letter a token, two for even ones."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(ord("A") + i) * (2 - i % 2) for i in ids)


@dataclass
class World:
    """What the tests of this module share. `other` are weights of another model of the same shape."""

    engine: RolloutEngine
    model: torch.nn.Module
    weights: dict[str, Tensor]
    other_model: torch.nn.Module
    other: dict[str, Tensor]
    folder: Path
    arch: ModelArch


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("models")
    folders = [tiny.make_model(root / str(seed), seed=seed) for seed in (0, 1)]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    arch = ModelArch.from_pretrained(folders[0])
    ranks, environment = tiny.one_rank(), dict(os.environ)
    engine = RolloutEngine(tiny.spec(folders[0], arch), ranks, Letters())
    # What runs beside the engine finds its process unchanged.
    for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "OMP_NUM_THREADS"):
        assert os.environ.get(name) == environment.get(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    yield World(engine, models[0], weights[0], models[1], weights[1], folders[0], arch)
    engine.close()
    assert torch.distributed.is_initialized(), "closing the engine must leave the trainer's groups"


@pytest.fixture
def engine(world: World) -> Iterator[RolloutEngine]:
    """The shared engine with nothing on it and the first model's weights in it."""
    yield world.engine
    world.engine.pause()
    if world.engine.version != 0:
        world.engine.load_weights(world.weights.items(), 0, world.weights)


def make(prompt: int, index: int = 0, length: int = 5) -> Sample:
    tokens = torch.randint(2, tiny.VOCAB, (length,), generator=torch.Generator().manual_seed(prompt))
    return Sample(SampleId(0, prompt, index), tuple(tokens.tolist()))


def run(engine: RolloutEngine, samples: list[Sample], sampling: SamplingOptions, seed: int = 0) -> list[Sample]:
    return run_samples(engine, samples, sampling, seed, timeout=120)


def log_probs(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the response by transformers."""
    tokens = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(sample.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, tokens[0, len(sample.prompt_ids) :, None])[:, 0]


def close(a: list[float] | Tensor, b: list[float] | Tensor, tolerance: float = 1e-4) -> bool:
    return bool((torch.as_tensor(a) - torch.as_tensor(b)).abs().max() < tolerance)


class TestAgainstTransformers:
    def test_greedy_continuation(self, engine: RolloutEngine, world: World) -> None:
        for sample in run(engine, [make(i) for i in range(6)], GREEDY):
            tokens = list(sample.prompt_ids)
            for token in sample.response_ids:
                with torch.no_grad():
                    assert int(world.model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
                tokens.append(token)
            assert sample.finish_reason == ("stop" if tokens[-1] == 1 else "length")
            assert close(sample.log_probs, log_probs(world.model, sample))

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
    def test_log_probs_belong_to_the_sampling_distribution(
        self, engine: RolloutEngine, world: World, temperature: float
    ) -> None:
        for sample in run(engine, [make(i) for i in range(8)], replace(SAMPLED, temperature=temperature)):
            assert close(sample.log_probs, log_probs(world.model, sample, temperature))
            assert sample.versions == [0] * len(sample.response_ids) == [0] * len(sample.log_probs)
            assert sample.engine == 0 and sample.truncated == (
                len(sample.response_ids) == 40 and sample.response_ids[-1] != 1
            )
            assert sample.text == Letters().decode(sample.response_ids)

    def test_log_probs_with_top_k_are_renormalised(self, engine: RolloutEngine, world: World) -> None:
        sample = run(engine, [make(3)], replace(SAMPLED, top_k=3))[0]
        tokens = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            logits = world.model(tokens).logits[0, 4:-1]
        kept = torch.where(logits >= logits.topk(3).values[:, -1:], logits, -torch.inf).log_softmax(-1)
        assert close(sample.log_probs, kept.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0])

    def test_sampling_follows_the_distribution(self, engine: RolloutEngine, world: World) -> None:
        """First tokens of many seeds against the model's probabilities (chi-squared, likeliest tokens and the rest)."""
        prompt, n = make(50), 3000
        samples = [Sample(SampleId(0, 50, i), prompt.prompt_ids) for i in range(n)]
        drawn = torch.tensor([s.response_ids[0] for s in run(engine, samples, SamplingOptions(max_response_len=1))])
        with torch.no_grad():
            p = world.model(torch.tensor([prompt.prompt_ids])).logits[0, -1].double().softmax(-1)
        top = p.topk(12).indices
        counts = torch.stack([(drawn == t).sum() for t in top]).double()
        counts = torch.cat([counts, n - counts.sum().view(1)])
        expected = n * torch.cat([p[top], (1 - p[top].sum()).view(1)])
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert torch.special.gammaincc(torch.tensor(6.0).double(), statistic / 2) > 1e-4

    def test_score(self, engine: RolloutEngine, world: World) -> None:
        samples = run(engine, [make(i, length=3 + i) for i in range(4)], replace(SAMPLED, max_response_len=192))
        scores = engine.score([[*s.prompt_ids, *s.response_ids] for s in samples], [len(s.prompt_ids) for s in samples])
        for sample, score in zip(samples, scores):
            assert len(score) == len(sample.response_ids)
            assert close(score, sample.log_probs) and close(score, log_probs(world.model, sample))


class TestCircumstances:
    def test_a_response_does_not_depend_on_what_else_runs(self, engine: RolloutEngine) -> None:
        alone = run(engine, [make(7)], SAMPLED)[0]
        crowd = run(engine, [make(i) for i in range(40)], SAMPLED)[7]
        assert crowd.response_ids == alone.response_ids and close(crowd.log_probs, alone.log_probs)
        torch.rand(17)  # the trainer draws from the global generator
        again = run(engine, [make(7)], SAMPLED)[0]
        assert again.response_ids == alone.response_ids
        other = run(engine, [make(7)], SAMPLED, seed=1)[0]
        assert other.response_ids != alone.response_ids
        siblings = run(engine, [make(7, i) for i in range(4)], SAMPLED)
        assert len({tuple(s.response_ids) for s in siblings}) == 4

    def test_a_kv_cache_too_small_for_all_changes_nothing(self, engine: RolloutEngine, world: World) -> None:
        """320 tokens of KV cache for 24 requests of up to 192: most wait, and running ones are preempted."""
        sampling = replace(SAMPLED, max_response_len=120)
        expected = run(engine, [make(i) for i in range(24)], sampling)
        small = RolloutEngine(tiny.spec(world.folder, world.arch, kv_cache_memory=330 * 1024), tiny.one_rank())
        try:
            assert small.vllm.kv_cache_tokens == 320
            most = preempted = 0
            before = (0, 24)  # running, unfinished

            def watch(engine: RolloutEngine) -> bool:
                nonlocal most, preempted, before
                running, unfinished = engine.num_running, len(engine.unfinished)
                preempted += before[0] - running > before[1] - unfinished
                most, before = max(most, running), (running, unfinished)
                return False

            got = run_samples(small, [make(i) for i in range(24)], sampling, 0, timeout=120, between_steps=watch)
            assert 1 < most < 24 and preempted > 0
        finally:
            small.close()
        for a, b in zip(got, expected):
            assert a.response_ids == b.response_ids and close(a.log_probs, b.log_probs)

    def test_paused_and_resumed_equals_uninterrupted(self, engine: RolloutEngine) -> None:
        expected = run(engine, [make(i) for i in range(6)], GREEDY)
        samples = [make(i) for i in range(6)]
        for sample in samples:
            engine.add(sample, GREEDY, 0)
        for _ in range(9):
            engine.step()
        paused = engine.pause(s.sample_id for s in samples[:3] if s.finish_reason is None)
        assert all(len(s.response_ids) == len(s.versions) == 9 and s.finish_reason is None for s in paused)
        for _ in range(4):
            engine.step()
        run(engine, paused, GREEDY)
        for a, b in zip(samples, expected):
            assert (a.response_ids, a.finish_reason) == (b.response_ids, b.finish_reason)
            assert close(a.log_probs, b.log_probs)

    def test_resumed_in_the_same_step(self, engine: RolloutEngine) -> None:
        expected = run(engine, [make(1)], GREEDY)[0]
        sample = make(1)
        engine.add(sample, GREEDY, 0)
        for _ in range(5):
            engine.step()
            engine.add(engine.pause([sample.sample_id])[0], GREEDY, 0)
        run(engine, [], GREEDY)
        assert sample.response_ids == expected.response_ids

    def test_resumed_sampling_takes_a_fresh_seed(self, engine: RolloutEngine, world: World) -> None:
        runs = []
        for _ in range(2):
            sample = make(11)
            engine.add(sample, SAMPLED, sample_seed(0, sample.sample_id))
            for _ in range(6):
                engine.step()
            runs.append(run(engine, engine.pause(), SAMPLED)[0])
        assert runs[0].response_ids == runs[1].response_ids
        assert close(runs[0].log_probs, log_probs(world.model, runs[0]))
        assert runs[0].response_ids[6:12] != runs[0].response_ids[:6]

    def test_abort(self, engine: RolloutEngine) -> None:
        expected = run(engine, [make(i) for i in range(3)], GREEDY)
        samples = [make(i) for i in range(3)]
        for sample in samples:
            engine.add(sample, GREEDY, 0)
        for _ in range(3):
            engine.step()
        assert engine.abort([samples[1].sample_id]) == [samples[1]]
        assert samples[1].finish_reason == "abort" and samples[1].response_ids == expected[1].response_ids[:3]
        run(engine, [], GREEDY)
        assert [samples[i].response_ids == expected[i].response_ids for i in (0, 2)] == [True, True]
        with pytest.raises(RolloutError, match="0-1-0 is not on engine 0"):
            engine.abort([samples[1].sample_id])

    def test_ends(self, engine: RolloutEngine) -> None:
        """Stop tokens, stop strings (within a token, over two) and the length limit, from one greedy response."""
        free = run(engine, [make(5)], replace(GREEDY, max_response_len=30))[0]
        a, b = free.response_ids[9], free.response_ids[10]
        cut = free.response_ids.index(a) + 1
        by_token = run(engine, [make(5)], replace(GREEDY, stop_token_ids=(a,)))[0]
        by_string = run(engine, [make(5)], replace(GREEDY, stop=(chr(ord("A") + a),)))[0]
        for sample in (by_token, by_string):
            assert sample.response_ids == free.response_ids[:cut] and sample.finish_reason == "stop"
            assert close(sample.log_probs, free.log_probs[:cut]) and len(sample.versions) == cut
        across = run(engine, [make(5)], replace(GREEDY, stop=(chr(ord("A") + a) + chr(ord("A") + b),)))[0]
        assert across.response_ids[-2:] == [a, b] and across.finish_reason == "stop" and len(across.response_ids) <= 11
        short = run(engine, [make(5)], replace(GREEDY, max_response_len=4))[0]
        assert short.response_ids == free.response_ids[:4] and short.truncated
        assert not engine.has_unfinished() and engine.step().tokens == 0


class TestWeights:
    def test_versions_follow_an_update_in_the_middle(self, engine: RolloutEngine, world: World) -> None:
        sample = make(2)
        engine.add(sample, SAMPLED, 1)
        for _ in range(10):
            engine.step()
        with pytest.raises(RolloutError, match="cannot load weights while 1 requests run"):
            engine.load_weights(world.other.items(), 3, world.other)
        paused = engine.pause()
        engine.load_weights(world.other.items(), 3, world.other)
        run(engine, paused, SAMPLED)
        n = len(sample.response_ids)
        assert n > 10 and sample.versions == [0] * 10 + [3] * (n - 10)
        assert close(sample.log_probs[:10], log_probs(world.model, sample)[:10])
        # No key or value of the old weights is used: the prefix cache is empty after an update.
        assert close(sample.log_probs[10:], log_probs(world.other_model, sample)[10:])

    def test_round_trip_is_exact(self, engine: RolloutEngine, world: World) -> None:
        before = run(engine, [make(i) for i in range(4)], SAMPLED)
        engine.load_weights(world.other.items(), 1, world.other)
        between = run(engine, [make(i) for i in range(4)], SAMPLED)
        engine.load_weights(reversed(world.weights.items()), 2, world.weights)
        after = run(engine, [make(i) for i in range(4)], SAMPLED)
        assert [s.response_ids for s in before] != [s.response_ids for s in between]
        assert [(s.response_ids, s.log_probs) for s in before] == [(s.response_ids, s.log_probs) for s in after]
        assert after[0].versions[0] == 2

    @pytest.mark.parametrize("fault", ["missing", "unknown", "twice"])
    def test_names_must_be_complete(self, engine: RolloutEngine, world: World, fault: str) -> None:
        name = "model.layers.1.mlp.gate_proj.weight"
        items = list(world.other.items())
        if fault == "missing":
            items = [item for item in items if item[0] != name]
        else:
            items.append((name if fault == "twice" else "model.layers.9.mlp.gate_proj.weight", world.other[name]))
        with pytest.raises(WeightSyncError, match=r"layers\.[19]\.mlp\.gate_proj"):
            engine.load_weights(items, 1, world.other)
        assert engine.version == -1
        with pytest.raises(RolloutError, match="has no weights"):
            engine.add(make(0), SAMPLED, 0)
        engine.load_weights(world.weights.items(), 0, world.weights)
        assert close((s := run(engine, [make(0)], SAMPLED)[0]).log_probs, log_probs(world.model, s))

    def test_weights_that_are_not_finite_are_noticed(self, engine: RolloutEngine, world: World) -> None:
        bad = {name: torch.full_like(t, torch.nan) if "lm_head" in name else t for name, t in world.weights.items()}
        engine.load_weights(bad.items(), 1, bad)
        with pytest.raises(RolloutError, match=r"0-0-0 the log-probabilities .* are not finite"):
            run(engine, [make(0)], SAMPLED)


class TestRefusals:
    def test_of_a_sample(self, engine: RolloutEngine) -> None:
        with pytest.raises(RolloutError, match="prompt 4 has 65 tokens, more than --max-prompt-len 64"):
            engine.add(make(4, length=65), SAMPLED, 0)
        with pytest.raises(RolloutError, match="193 tokens is asked for"):
            engine.add(make(4), SamplingOptions(max_response_len=193), 0)
        with pytest.raises(RolloutError, match=r"prompt 4 .* outside the vocabulary of 96"):
            engine.add(Sample(SampleId(0, 4, 0), (tiny.VOCAB + 5,)), SAMPLED, 0)
        engine.add(make(4), SAMPLED, 0)
        with pytest.raises(RolloutError, match="0-4-0 is on engine 0 already"):
            engine.add(make(4), SAMPLED, 0)
        with pytest.raises(RolloutError, match="cannot score while 1 requests run"):
            engine.score([[2, 3]], [1])
        complete = run(engine, [], SAMPLED)[0]
        with pytest.raises(RolloutError, match="is complete"):
            engine.add(complete, SAMPLED, 0)

    def test_time_limit_names_what_is_left(self, engine: RolloutEngine) -> None:
        with pytest.raises(RolloutError, match=r"engine 0 .*--rollout-timeout-minutes.* left: 0-0-0"):
            run_samples(engine, [make(i) for i in range(3)], GREEDY, 0, timeout=0.0)

    def test_hook_and_progress(self, engine: RolloutEngine) -> None:
        """The hook may add work to an idle engine; progress ends with everything finished."""
        late, seen = [make(8)], []

        def hook(engine: RolloutEngine) -> bool:
            if not engine.has_unfinished() and late:
                engine.add(late.pop(), GREEDY, 0)
            return bool(late)

        done = run_samples(engine, [make(6)], GREEDY, 0, timeout=60, progress=seen.append, between_steps=hook)
        assert [s.sample_id.prompt_id for s in done] == [6, 8]
        assert seen[-1] == Progress(sum(len(s.response_ids) for s in done), 2, 0, 0)
