"""The window's rules, alone and with engines that publish late, steal and stop at different times."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.errors import RolloutError
from rhymemeg.histopipe.window import (
    EngineLedger,
    Progress,
    WindowTotals,
    beta,
    check_alive,
    choose_victim,
    is_outlier,
    missing,
    total,
)


def start_all(ledger):
    keys = []
    while (key := ledger.start()) is not None:
        keys.append(key)
    return keys


def test_resumed_first_then_new_then_early_when_nothing_runs():
    ledger = EngineLedger(0, 2, ["r"], ["a", "b"], ["x", "y"])
    assert start_all(ledger) == ["r", "a"]
    assert ledger.finish("r") and start_all(ledger) == ["b"]
    assert ledger.finish("a") and start_all(ledger) == [], "a free slot alone does not start the next step"
    assert ledger.finish("b") and start_all(ledger) == ["x", "y"]
    assert ledger.finish("x") is False
    assert ledger.progress() == Progress(3, 3, 1)


def test_early_in_free_slots():
    ledger = EngineLedger(0, 3, [], ["a"], ["x", "y", "z"], early_in_free_slots=True)
    assert start_all(ledger) == ["a", "x", "y"]
    paused = ledger.close()
    assert paused.carried == ("a",) and paused.early == ("x", "y")
    assert ledger.start() is None


def test_strict_window_closes_only_when_all_is_complete():
    totals = WindowTotals(samples=2, due=0, max_unfinished=0)
    assert not totals.may_close(Progress(2, 1, 0)) and totals.may_close(Progress(2, 2, 0))
    assert WindowTotals(0, 0, 0).may_close(Progress(0, 0, 0)), "nothing to do"


def test_due_and_waiting_hold_the_window_open():
    totals = WindowTotals(samples=10, due=2, max_unfinished=5)
    assert totals.may_close(Progress(10, 5, 2))
    assert not totals.may_close(Progress(10, 9, 1)), "a resumed response is still running"
    assert not totals.may_close(Progress(9, 9, 2)), "one has not started"
    assert not totals.may_close(Progress(10, 4, 2)), "too many are running"


def test_closing_against_the_rules_is_refused():
    ledger = EngineLedger(3, 1, ["r"], ["a"])
    ledger.start()
    with pytest.raises(RolloutError, match="engine 3"):
        ledger.close()
    ledger.finish("r")
    with pytest.raises(RolloutError, match="1 requests not started"):
        ledger.close()


def test_stealing_takes_the_end_of_the_queue_but_not_what_starts_at_once():
    ledger = EngineLedger(0, 2, [], list("abcdef"))
    assert ledger.backlog == 4
    assert ledger.give(3) == ("d", "e", "f") and ledger.give(9) == ("c",) and ledger.give(1) == ()
    assert start_all(ledger) == ["a", "b"]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_work_only_moves_from_a_longer_queue_to_a_shorter(backlog, data):
    thief = data.draw(st.integers(0, len(backlog) - 1))
    choice = choose_victim(np.array(backlog), thief)
    if max(backlog) == backlog[thief]:
        assert choice is None
    else:
        victim, number = choice
        assert backlog[victim] == max(backlog) and victim == backlog.index(max(backlog))
        assert number >= 1 and backlog[victim] - number >= backlog[thief] + number - 1


def test_moving_keeps_counts_and_duty():
    a, b = EngineLedger(0, 4, ["r"], ["n"]), EngineLedger(1, 4, [], [])
    start_all(a)
    b.move_in("r", a.move_out("r"))
    assert start_all(b) == ["r"] and b.is_due("r") and not a.is_due("r")
    assert total([a.progress(), b.progress()]) == Progress(2, 0, 0)
    b.finish("r")
    assert total([a.progress(), b.progress()]) == Progress(2, 1, 1)
    a.release("n")
    assert WindowTotals(2, 1, 0).may_close(total([a.progress(), b.progress()]))
    with pytest.raises(KeyError):
        a.finish("n")


def test_released_responses_must_not_be_due():
    ledger = EngineLedger(0, 1, ["r"], [])
    ledger.start()
    with pytest.raises(KeyError):
        ledger.release("r")


def test_a_request_that_moved_in_and_waits_for_a_slot_is_carried():
    a, b = EngineLedger(0, 1, [], ["x"]), EngineLedger(1, 1, [], ["y"])
    a.start(), b.start()
    b.move_in("x", a.move_out("x"))
    assert WindowTotals(2, 0, 2).may_close(total([a.progress(), b.progress()]))
    assert a.close().carried == () and b.close().carried == ("y", "x")
    with pytest.raises(RolloutError, match="after the window had closed"):
        b.move_in("z", False)


def test_silent_engines_are_named():
    heard = {0: 10.0, 1: 3.0, 2: 9.5, 3: 1.0}
    assert missing(heard, now=10.0, timeout=5.0) == [1, 3]
    with pytest.raises(RolloutError, match=r"close of step 4: no word from engine\(s\) 1, 3 for 5 s"):
        check_alive(heard, 10.0, 5.0, "close of step 4")
    check_alive(heard, 10.0, 60.0, "close of step 4")
    with pytest.raises(RolloutError, match="and 84 more"):
        check_alive(dict.fromkeys(range(100), 0.0), 10.0, 5.0, "start")


@given(st.data())
def test_any_interleaving_closes_within_the_rules(data):
    """Engines act in random order. Progress is published and read late, stolen work is delivered late or not before the
    close is near, and the word that the window has closed reaches each engine at another time."""
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    engines, slots = rng.randint(1, 5), rng.randint(1, 4)
    resumed = [[("r", e, i) for i in range(rng.randint(0, 3))] for e in range(engines)]
    queue = [[("n", e, i) for i in range(rng.randint(0, 8))] for e in range(engines)]
    ledgers = [EngineLedger(e, slots, resumed[e], queue[e]) for e in range(engines)]
    due = sum(map(len, resumed))
    samples = due + sum(map(len, queue))
    totals = WindowTotals(samples, due, rng.randint(0, samples))
    published = [Progress(0, 0, 0)] * engines
    travelling: list[tuple[int, tuple]] = []
    running: list[list] = [[] for _ in range(engines)]
    finished: list = []
    told: set[int] = set()
    paused: list = []
    closed = False
    reading: list[Progress] = []  # a sum in progress: the engines are read one by one, while they go on
    silent = rng.randint(0, engines) - 1  # publishes ten times more rarely
    for _ in range(20_000):
        if len(told) == engines:
            break
        e = rng.randrange(engines)
        action = rng.choice(("start", "finish", "publish", "read", "steal", "deliver", "poll"))
        if action == "deliver" and travelling:
            thief, keys = travelling.pop(rng.randrange(len(travelling)))
            ledgers[thief].accept(keys)
        elif action == "read":
            reading.append(published[len(reading)])
            if len(reading) == engines:
                closed = closed or totals.may_close(total(reading))
                reading = []
        elif e in told:
            continue
        elif action == "start" and (key := ledgers[e].start()) is not None:
            running[e].append(key)
        elif action == "finish" and running[e]:
            key = running[e].pop(rng.randrange(len(running[e])))
            assert ledgers[e].finish(key)
            finished.append(key)
        elif action == "publish" and (e != silent or rng.random() < 0.1):
            published[e] = ledgers[e].progress()
        elif action == "steal" and ledgers[e].wants_work():
            choice = choose_victim(np.array([ledger.backlog for ledger in ledgers]), e)
            if choice and (keys := ledgers[choice[0]].give(choice[1])):
                travelling.append((e, keys))
        elif action == "poll" and closed:
            left = ledgers[e].close()  # raises if the window was closed against its rules
            assert set(left.carried) == set(running[e])
            paused += left.carried
            told.add(e)
    assert len(told) == engines, "the window never closed"
    assert sorted(finished + paused) == sorted(key for part in resumed + queue for key in part)
    assert len(paused) <= totals.max_unfinished
    assert not any(key[0] == "r" for key in paused)


def test_a_dead_engine_keeps_the_window_open_and_is_named():
    """Its requests never settle, so nobody closes; its silence is what ends the wait."""
    alive, dead = EngineLedger(0, 2, [], ["a"]), EngineLedger(1, 2, [], ["b", "c"])
    start_all(alive), start_all(dead)
    alive.finish("a")
    assert not WindowTotals(3, 0, 1).may_close(total([alive.progress(), dead.progress()]))
    with pytest.raises(RolloutError, match=r"engine\(s\) 1 "):
        check_alive({0: 99.0, 1: 0.0}, 100.0, 30.0, "window of step 1")


def test_outliers_of_a_ranking_group():
    assert is_outlier(tokens=121, unfinished=10, group_size=100, group_longest=100, growth=1.2)
    assert not is_outlier(120, 10, 100, 100, 1.2)
    assert not is_outlier(500, 11, 100, 100, 1.2)
    assert beta([100, 200, 300, 400], [100, 100, 100, 100]) == pytest.approx(3.25)
    assert beta([50, 60], [100, 100]) == beta([], []) == 1.1
