"""The simulated windows keep the invariants for any lengths, and reach what the planner promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.histopipe.cost import ENGINE_STEPS
from rhymemeg.histopipe.simulate import SETTINGS
from rhymemeg.histopipe.simulator import Setting, Simulator, Speculation, simulate
from rhymemeg.histopipe.workloads import Lognormal, StepLengths, degrade

CAP = 60
SMALL = Setting(engines=3, slots=2, samples=2, cap=CAP, prompt_tokens=0, cost=ENGINE_STEPS, span_engines=99)


def steps_of(lengths, history):
    return [
        StepLengths(i * len(now) + np.arange(len(now)), np.array(last, float), np.array(now))
        for i, (now, last) in enumerate(zip(lengths, history))
    ]


@st.composite
def workloads(draw):
    prompts, windows = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    length = st.one_of(st.integers(1, CAP), st.just(CAP))
    past = st.one_of(st.floats(1, 100), st.just(float("nan")))
    shape = (windows + 1, prompts, 2)
    size = int(np.prod(shape))
    return steps_of(
        np.array(draw(st.lists(length, min_size=size, max_size=size))).reshape(shape),
        np.array(draw(st.lists(past, min_size=size, max_size=size))).reshape(shape),
    )


@st.composite
def all_settings(draw):
    changes = dict(SETTINGS[draw(st.sampled_from(sorted(SETTINGS)))])
    changes["keep_place"] = draw(st.booleans())
    if changes.get("carry"):
        changes["carry"] = draw(st.sampled_from((0.1, 0.4, 1.0)))
    return replace(SMALL, **changes, engines=draw(st.integers(1, 6)), slots=draw(st.integers(1, 4)))


@given(workloads(), all_settings())
def test_invariants(steps, setting):
    """Every sample is trained exactly once, at most one window late; it stays in at most two windows; its tokens add up
    over pauses, carrying, stealing and moving; carried ones are bounded and never carried twice."""
    simulator = Simulator(setting)
    tokens: Counter = Counter()
    windows: dict[str, set[int]] = {}
    trained: Counter = Counter()
    carried: Counter = Counter()
    per_step = steps[0].actual.size
    for w, (now, then) in enumerate(pairwise(steps)):
        record = simulator.run_window(now, then)
        assert record.carried_out <= record.max_unfinished <= setting.carry * per_step + 1e-6
        for span in record.spans:
            tokens[span.sample] += span.tokens
            windows.setdefault(span.sample, set()).add(w)
        for key in simulator.trained:
            trained[key] += 1
            assert w - key // per_step in (0, 1)
        carried.update(r.key for r in simulator.unfinished if r.key // per_step == w)
        assert record.generated_tokens == sum(span.tokens for span in record.spans)
        assert record.samples == len(simulator.trained)
        assert 0 <= record.idle_share <= 1
    assert set(trained.values()) <= {1} and set(carried.values()) <= {1}
    assert all(len(seen) <= 2 for seen in windows.values())
    pending = {r.key: r.tokens for r in simulator.unfinished}
    done_early = set(simulator.finished_early)
    for w, step in enumerate(steps[:-1]):
        for index, length in enumerate(step.actual.ravel().tolist()):
            key, (prompt, sample) = w * per_step + index, divmod(index, setting.samples)
            name = f"{w}-{step.prompt_ids[prompt]}-{sample}"
            if key in pending:
                assert tokens[name] == pending[key] < length and key not in trained
            else:
                assert tokens[name] == length and (trained[key] == 1) != (key in done_early)


@given(workloads())
def test_without_carry_every_step_ends_in_its_window(steps):
    """rho = 0 is the strict schedule: the same plans and the same spans as with no rule about carrying at all."""
    strict = Simulator(replace(SMALL, carry=0.0))
    for w, (now, then) in enumerate(pairwise(steps)):
        record = strict.run_window(now, then)
        assert not strict.unfinished and record.stale_tokens == 0
        assert sorted(strict.trained) == list(range(w * now.actual.size, (w + 1) * now.actual.size))
        last = max(span.end for span in record.spans)
        assert record.seconds == pytest.approx(last)


def test_one_engine_by_hand():
    """Two slots, two samples of 5 and two of 4 tokens, known beforehand: the longer pair runs first."""
    steps = steps_of([[[5, 5], [4, 4]], [[1, 1], [1, 1]]], [[[5, 5], [4, 4]], [[1, 1], [1, 1]]])
    record = Simulator(replace(SMALL, engines=1)).run_window(*steps)
    assert record.seconds == pytest.approx(9) and record.idle_share == 0
    spans = sorted((round(span.begin, 6), round(span.end, 6)) for span in record.spans)
    assert spans == [(0, 5), (0, 5), (5, 9), (5, 9)]
    assert record.engine_steps == (9,)


def test_carrying_by_hand():
    """One of four may be carried: the window closes at 2, when one response of 10 is left with 2 of its tokens; it ends
    in the next window, which waits for it."""
    steps = steps_of([[[10, 1], [2, 2]], [[1, 1], [1, 1]], [[1, 1], [1, 1]]], [[[9, 9], [9, 9]]] * 3)
    simulator = Simulator(replace(SMALL, engines=1, slots=4, carry=0.25))
    simulator.carry = replace(simulator.carry, margin=0.25)
    first = simulator.run_window(steps[0], steps[1])
    assert first.seconds == pytest.approx(2) and first.carried_out == 1
    assert [r.tokens for r in simulator.unfinished] == [2]
    second = simulator.run_window(steps[1], steps[2])
    assert second.seconds == pytest.approx(8) and second.stale_tokens == 2 and second.samples == 5
    assert second.recomputed_tokens == 2


def test_deterministic():
    setting = replace(SMALL, carry=0.2, engines=4, slots=3, cap=2000)
    runs = [simulate(setting, Lognormal(200).steps(8, 2, 2000, 5), 4) for _ in range(2)]
    assert [r.to_json() for r in runs[0]] == [r.to_json() for r in runs[1]]


def test_speculation_shortens_windows_as_its_formula_says():
    plain = replace(SMALL, engines=2, slots=64, cap=2000)
    fast = replace(plain, speculation=Speculation(draft=3, accept=0.5))
    # Tokens a step: 1 + 1/2 + 1/4 + 1/8; the steps cost the same here.
    times = [simulate(s, Lognormal(200).steps(8, 2, 2000, 5), 3)[0].seconds for s in (plain, fast)]
    assert times[0] / times[1] == pytest.approx(1.875)


def speed(records):
    return sum(r.generated_tokens for r in records) / sum(r.seconds for r in records)


def run(name, steps, **changes):
    setting = replace(Setting(engines=16), **(SETTINGS[name] | changes))
    return simulate(setting, iter(steps), 6)[1:]


@pytest.fixture(scope="module", params=[1160.0, 4000.0], ids=["short", "long"])
def real_size(request):
    """16 engines, 8 prompts x 16 samples each."""
    return list(islice(Lognormal(request.param).steps(128, 16, 16384, 1), 7))


def test_bars_of_the_default_policy(real_size):
    base = speed(run("random", real_size))
    spread, group = run("complement", real_size), run("complement-group", real_size)
    for records, idle in ((spread, 0.01), (group, 0.05)):
        assert speed(records) / base >= 1.35
        assert np.mean([r.idle_share for r in records]) <= idle
        assert sum(r.stale_tokens for r in records) / sum(r.tokens for r in records) <= 0.12
        assert max(r.carried_out for r in records) <= 0.03 * 128 * 16
    drawn = np.mean([r.mean_length_started for r in spread])
    kept = sum(r.tokens for r in spread) / sum(r.samples for r in spread)
    assert kept / drawn == pytest.approx(1, abs=0.02), "carrying does not bias the lengths that are trained"


@pytest.mark.parametrize(
    ("history", "adapt", "bar"),
    [("none", True, 1.3), ("adversarial", True, 0.95), ("adversarial", False, 0.95), ("shuffled", False, 0.95)],
)
def test_bad_predictions_degrade_gently(real_size, history, adapt, bar):
    """With `adapt` the planner notices after one window that the ranking is wrong; without it, it never does."""
    bad = [degrade(step, history, 0) for step in real_size]
    base = speed(run("random", bad))
    for name in ("complement", "complement-group"):
        assert speed(run(name, bad, adapt=adapt)) / base >= bar
    if adapt:
        assert speed(run("strict", bad)) / base >= 0.95
