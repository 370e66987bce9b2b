"""The board: counters that add up, letters in order, commands for the ranks of an engine, windows that do not mix."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.errors import RolloutError
from rhymemeg.histopipe.window import Progress
from rhymemeg.rollout.board import CANDIDATES, MAX_SAMPLES, Letter, Status, WindowBoard


def boards(engines: int, **options) -> list[WindowBoard]:
    store = dist.HashStore()
    made = [WindowBoard(store, e, engines, **options) for e in range(engines)]
    for board in made:
        board.begin()
    return made


COUNT = st.integers(0, MAX_SAMPLES // 8)


@given(st.lists(st.tuples(COUNT, COUNT, COUNT), min_size=1, max_size=8))
def test_counters_add_up(deltas: list[tuple[int, int, int]]) -> None:
    board, total = boards(1)[0], Progress(0, 0, 0)
    for delta in deltas:
        total = total + Progress(*delta)
        assert board.add(Progress(*delta)) == total
    assert board.add(Progress(0, 0, 0)) == total


def test_the_largest_window_fits() -> None:
    (board,) = boards(1)
    full = Progress(MAX_SAMPLES, MAX_SAMPLES, MAX_SAMPLES)
    assert board.add(full) == full


@given(st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.integers()), st.binary(max_size=40))
def test_letters_survive(kind: str, fields: dict[str, int], data: bytes) -> None:
    letter = Letter(kind, fields, data)
    assert Letter.unpack(letter.pack()) == letter


def test_letters_arrive_in_order_and_once() -> None:
    a, b, c = boards(3)
    for i in range(3):
        a.post(1, Letter("n", {"i": i}, b"\n" * i))
        c.post(0, Letter("other", {}))
    assert [letter.fields["i"] for letter in b.letters()] == [0, 1, 2]
    assert b.letters() == [] and len(a.letters()) == 3


def test_windows_do_not_mix() -> None:
    a, b = boards(2)
    a.add(Progress(3, 2, 1))
    a.post(1, Letter("late", {}))
    a.publish(Status(5, 0, 1, 9, 2))
    for board in (a, b):
        board.begin()
    assert b.letters() == [] and b.add(Progress(0, 0, 0)) == Progress(0, 0, 0)
    assert b.statuses([0]) == {0: Status(0, 0, 0, 0, 0)}


def test_nothing_is_left_behind() -> None:
    """Keys do not pile up over the windows of a long run."""
    made = boards(3)
    sizes = []
    for _ in range(3):
        for board in made:
            board.add(Progress(1, 0, 0))
            board.pull("queue", 2)
            board.count("group/1", 1)
            board.post((board.engine + 1) % 3, Letter("late", {}))
        for board in made:
            board.begin()
        sizes.append(made[0]._store.num_keys())
    assert sizes == [3, 3, 3], "one status an engine"


def test_statuses_of_engines_that_have_not_begun_are_left_out() -> None:
    store = dist.HashStore()
    a, b = WindowBoard(store, 0, 3), WindowBoard(store, 1, 3)
    a.begin()
    b.begin()
    b.publish(Status(1, 2, 3, 4, 5))
    assert a.statuses([1, 2]) == {1: Status(1, 2, 3, 4, 5)} and a.statuses([2]) == {} and a.statuses([]) == {}


@pytest.mark.parametrize("engines", [2, CANDIDATES, CANDIDATES + 1, 500, 4096])
def test_thieves_look_at_a_bounded_number_of_others(engines: int) -> None:
    board, seen = WindowBoard(dist.HashStore(), engines // 2, engines), set()
    for turn in range(200):
        some = board.candidates(turn)
        assert len(some) == len(set(some)) == min(CANDIDATES, engines - 1)
        assert board.engine not in some and all(0 <= e < engines for e in some)
        seen |= set(some)
    assert len(seen) == engines - 1, "everyone comes up in time"


def test_shared_lists_are_taken_once() -> None:
    a, b = boards(2)
    assert [a.pull("queue", 3), b.pull("queue", 2), a.pull("queue", 1), a.pull("early", 4)] == [0, 3, 5, 0]


def test_commands_reach_every_rank_of_the_engine_and_silence_is_an_error() -> None:
    store = dist.HashStore()
    ranks = [WindowBoard(store, 0, 2, tp_rank=r, ranks=3, timeout=0.5) for r in range(3)]
    for rank in ranks:
        rank.begin()
    heard: list[list[Letter]] = []
    threads = [threading.Thread(target=lambda r=r: heard.append(ranks[r].obey())) for r in (1, 2)]
    for thread in threads:
        thread.start()
    letters = [Letter("grant", {"keys": ["1-2-3"]}, b"history\nwith a line"), Letter("next", {"turns": 4})]
    ranks[0].command(letters)
    for thread in threads:
        thread.join()
    assert heard == [letters, letters]
    with pytest.raises(RolloutError, match=r"engine 0: no word from its leader for 0.5 s"):
        ranks[1].obey()
