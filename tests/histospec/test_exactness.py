"""Drafting changes no distribution, on a real engine: figures of `check_exactness.py`, which runs in its own process
because it takes vLLM's replacements out again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.histospec.check_exactness", str(tmp_path_factory.mktemp("model"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    # It prints all it has before it draws without the replacements, which may end the process.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def named(figures: dict[str, float], start: str) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name.startswith(start)}


def test_greedy_tokens_are_those_of_transformers(figures: dict[str, float]) -> None:
    assert figures["greedy_wrong"] == 0
    assert all(accepted > 100 for accepted in named(figures, "greedy_accepted").values())


@pytest.mark.parametrize("way", ["exact:", "kernels:"])
def test_sequences_have_their_exact_probabilities(figures: dict[str, float], way: str) -> None:
    """With plenty of drafts accepted and refused, at temperature 1 and with top-p and top-k."""
    tests = named(figures, f"{way} p_value")
    assert tests and all(value > 1e-4 for value in tests.values()), tests
    for what in ("accepted", "refused"):
        assert all(value > 1000 for value in named(figures, f"{way} {what}").values())


def test_log_probabilities_are_those_of_the_distribution(figures: dict[str, float]) -> None:
    assert all(error < 1e-3 for name, error in figures.items() if "log_prob_error" in name)


def test_the_check_can_fail(figures: dict[str, float]) -> None:
    """Draws at another temperature, and draws without the replacements. Should the latter pass after an update of vLLM, its
    faults are gone and so may be the replacements."""
    assert figures["other temperature: p_value"] < 1e-6
    assert figures["without: p_value"] < 1e-6


def test_attaching_without_the_replacements_is_refused(figures: dict[str, float]) -> None:
    assert figures["attach_refuses"] == 1
