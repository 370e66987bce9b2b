"""The window protocol on many engines: nothing lost, nothing twice, nothing older than allowed, nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rhymemeg.errors import RolloutError
from rhymemeg.histopipe.scheduler import Scheduler, SchedulerOptions
from rhymemeg.rollout import execution
from rhymemeg.rollout.samples import SampleId
from tests.rollout.scripted import Cluster, ScriptedEngine

CAP = 60


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a model take microseconds, and so do polls."""
    monkeypatch.setattr(execution, "POLL_SECONDS", 0.0005)
    monkeypatch.setattr(execution, "IDLE_SECONDS", 0.0002)


def lengths(seed: int, skew: float = 1.0):
    """Lengths by sample: heavy-tailed, alike over epochs for a prompt."""

    def length(sid: SampleId) -> int:
        prompt = random.Random(f"{seed}/{sid.prompt_id}").lognormvariate(2.0, skew)
        noise = random.Random(f"{seed}/{sid}").lognormvariate(0.0, 0.3)
        return max(1, min(CAP, round(prompt * noise)))

    return length


def scheduler(options: SchedulerOptions, engines: int, slots: int = 3, samples: int = 3) -> Scheduler:
    return Scheduler(options, num_engines=engines, slots=slots, samples_per_prompt=samples, max_response_len=CAP)


POLICIES = st.sampled_from(
    [
        SchedulerOptions("random"),
        SchedulerOptions("complement", "group", carry=0.2),
        SchedulerOptions("complement", "spread", carry=0.1, early=0.3),
        SchedulerOptions("complement", "spread"),
        SchedulerOptions("pull", carry=0.15, early=0.5),
        SchedulerOptions("paper", carry=0.1, early=1.0, outliers=True, ranking_groups=3),
    ]
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(POLICIES, st.integers(1, 4), st.integers(0, 1000), st.booleans(), st.floats(0.2, 1.5))
def test_every_sample_exactly_once(options, engines, seed, steal, skew) -> None:
    """Five steps over two epochs of ten prompts, then a strict one."""
    length = lengths(seed, skew)
    s = scheduler(options, engines)
    cluster = Cluster(s, length, steal=steal)
    prompts = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9], [0, 1, 2, 3]]
    seen: Counter[SampleId] = Counter()
    for step, now in enumerate(prompts):
        last = step + 1 == len(prompts)
        limit = s.carry_share(len(now))
        waiting = set(cluster.paused)
        finished, outcomes, record = cluster.window(step, now, () if last else prompts[step + 1], strict=last)
        for sample in finished:
            seen[sample.sample_id] += 1
            assert len(sample.response_ids) == len(sample.versions) == len(sample.log_probs) == length(sample.sample_id)
            assert sample.versions == sorted(sample.versions) and len(set(sample.versions)) <= 2
            assert step - sample.versions[0] <= 1, "a response spans at most two windows"
        carried = [sid for sid in cluster.paused if sid.step == step]
        assert len(carried) <= limit * 12 + 1e-9 and record.carried_out == len(carried)
        assert not waiting & set(cluster.paused), "nobody is carried twice"
        assert waiting <= {x.sample_id for x in finished}
        assert set(cluster.paused) == set(s.unfinished)
        assert sum(o.report.generated_tokens for o in outcomes) == record.generated_tokens
        assert sum(span.tokens for o in outcomes for span in o.report.spans) == record.generated_tokens
    assert not cluster.paused and not cluster.early
    assert seen == Counter(SampleId(t, p, i) for t, now in enumerate(prompts) for p in now for i in range(3))


@given(st.integers(0, 50))
@settings(max_examples=5, deadline=None)
def test_state_survives_a_checkpoint(seed: int) -> None:
    """A scheduler restored from its state makes the same plan."""
    import json

    options = SchedulerOptions("complement", "spread", carry=0.3, early=0.3)
    s, cluster = (made := scheduler(options, 3)), Cluster(made, lengths(seed))
    for step in range(3):
        cluster.window(step, [0, 1, 2, 3], [0, 1, 2, 3])
    other = scheduler(options, 3)
    other.restore(json.loads(json.dumps(s.state())))
    assert other.plan(3, [0, 1, 2, 3], [0, 1, 2, 3]).digest == s.plan(3, [0, 1, 2, 3], [0, 1, 2, 3]).digest
    assert other.state() == s.state()


def test_work_moves_to_engines_without_any() -> None:
    """One engine got all the long ones: with one slot each, the others take what it has not started."""
    s = scheduler(SchedulerOptions("random"), 3, slots=1, samples=1)
    cluster = Cluster(s, lambda sid: 40)
    cluster.prepare = lambda engine: setattr(engine, "step_seconds", 0.002 if engine.engine_index == 0 else 0.0002)
    _, outcomes, record = cluster.window(0, list(range(12)))
    assert record.stolen > 0 and max(o.report.steps for o in outcomes) < 12 * 40
    assert record.step_idle_share < 0.6


def test_a_slow_engine_is_waited_for() -> None:
    def prepare(engine: ScriptedEngine) -> None:
        engine.step_seconds = 0.01 if engine.engine_index == 1 else 0.0

    cluster = Cluster(scheduler(SchedulerOptions("random"), 3), lengths(1), steal=False)
    cluster.prepare = prepare
    finished, *_ = cluster.window(0, [1, 2, 3])
    assert len(finished) == 9


@pytest.mark.parametrize("how", ["dead", "silent", "never begins"])
def test_an_engine_that_stops_is_named(how: str) -> None:
    def prepare(engine: ScriptedEngine) -> None:
        if engine.engine_index == 2:
            if how == "never begins":
                raise SystemExit  # in its thread, before its first poll
            engine.die_after = 3
            engine.step_seconds = 0.0 if how == "dead" else 4.0

    cluster = Cluster(scheduler(SchedulerOptions("random"), 3), lambda sid: 30, steal=False, silence=0.5)
    cluster.prepare = prepare
    with pytest.raises(RolloutError, match=r"no word from engine\(s\) 2 for 0.5 s"):
        cluster.window(0, [1, 2, 3])


def test_out_of_time_says_who_still_works() -> None:
    cluster = Cluster(scheduler(SchedulerOptions("random"), 2), lambda sid: 10, steal=False, timeout=1.0)
    cluster.prepare = lambda engine: setattr(engine, "step_seconds", 0.3 if engine.engine_index == 1 else 0.0)
    with pytest.raises(RolloutError):
        cluster.window(0, [1, 2])
    messages = " ".join(map(str, cluster.errors))
    assert "engine 1" in messages and "--rollout-timeout-minutes" in messages


def test_polls_do_not_grow_with_the_engines() -> None:
    """Requests to the store a poll: the same for 2 and for 12 engines (stealing looks at others, but seldom)."""
    per_poll = {}
    for engines in (2, 12):
        s = scheduler(SchedulerOptions("complement", "spread"), engines, slots=4)
        cluster = Cluster(s, lambda sid: 50, steal=False)
        cluster.window(0, list(range(engines)))
        polls = [board._last.polls for board in cluster.boards]
        per_poll[engines] = sum(board.operations for board in cluster.boards) / sum(polls)
    assert per_poll[12] <= per_poll[2] + 0.5 < 5


@pytest.mark.parametrize("step", [2, 3])
def test_outliers_of_the_paper_move_on(step: int) -> None:
    """Two ranking groups on two engines, known from the steps before. Then one response of the short group outgrows it and
    moves to the engine of the long one, and one of the long group is left to the next window."""
    options = SchedulerOptions("paper", carry=0.1, ranking_groups=2, outliers=True)
    s = scheduler(options, 2, slots=40, samples=4)
    grown = {SampleId(step, 1, 0): 50, SampleId(step, 15, 2): 59}

    def length(sid: SampleId) -> int:
        return grown.get(sid, 5 if sid.prompt_id < 10 else 30)

    cluster = Cluster(s, length, steal=False)
    cluster.prepare = lambda engine: setattr(engine, "step_seconds", 0.001)
    for before in range(step):
        cluster.window(before, list(range(20)))
    finished, outcomes, record = cluster.window(step, list(range(20)))
    moved = [span for o in outcomes for span in o.report.spans if span.outcome == "moved"]
    assert [span.sample for span in moved] == [str(SampleId(step, 1, 0))]
    assert set(cluster.paused) == {SampleId(step, 15, 2)} and record.migrated == 2
    assert len(finished) == 79 and {len(x.response_ids) for x in finished} == {5, 30, 50}
    finished, _, record = cluster.window(step + 1, [], strict=True)
    assert [(x.sample_id, len(x.response_ids)) for x in finished] == [(SampleId(step, 15, 2), 59)]
