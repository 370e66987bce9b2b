"""tools/scale.py counts what the board really asks of a store, and nothing there grows with the number of engines."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest

from rhymemeg.histopipe.window import Progress
from rhymemeg.rollout.board import CANDIDATES, Status, WindowBoard
from tests.torchrun import ROOT


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "tools" / "scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["scale"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_counting_store_counts_what_the_board_does(scale: ModuleType) -> None:
    store: Any = scale.CountingStore()
    boards = [WindowBoard(store, engine, 3) for engine in range(3)]
    for board in boards:
        board.begin()
    start = store.requests
    before = sum(board.operations for board in boards)
    assert boards[0].add(Progress(2, 1, 1)) == Progress(2, 1, 1)
    assert boards[1].add(Progress(1, 0, 0)) == Progress(3, 1, 1)
    boards[2].publish(Status(*range(1, 1 + len(Status._fields))))
    known = boards[0].statuses([1, 2])
    assert known[2] == Status(*range(1, 1 + len(Status._fields)))
    assert store.requests - start == sum(board.operations for board in boards) - before == 5


def test_a_poll_costs_the_same_with_any_number_of_engines(scale: ModuleType) -> None:
    few, many = scale.window(CANDIDATES + 1, 1), scale.window(4096, 1)
    assert many.quiet_requests / many.polls_a_second == few.quiet_requests / few.polls_a_second
    assert many.steal_requests / many.polls_a_second == few.steal_requests / few.polls_a_second
    assert many.steal_bytes / many.polls_a_second < 1.1 * few.steal_bytes / few.polls_a_second
    assert many.polls_a_second <= 4000
    # Ranks that obey add one request each, and their leader one for each of them.
    wide = scale.window(512, 8)
    assert wide.quiet_requests / wide.polls_a_second == many.quiet_requests / many.polls_a_second + 2 * 7


def test_the_tool_prints_json(scale: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--gpus", "8", "16", "--engine-tp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["engines"] for row in found["sizes"]] == [4, 8]
    assert found["store_requests_a_second"] > 100
    one, two = (row["step"] for row in found["sizes"])
    assert two["summary_bytes"] == 2 * one["summary_bytes"]
    assert scale.main(["--gpus", "3", "--engine-tp", "2"]) == 2
