"""The distribution that rejection sampling on CPU draws from: exact with the replacements, wrong without them.

`check_plugin.py` draws; it runs in its own process because the replacements cannot be taken back in one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rhymemeg.rollout import cpu_sampling, plugin

ROOT = Path(__file__).resolve().parents[2]


def run_both() -> dict[str, dict[str, float]]:
    """Figures of check_plugin.py with and without the replacements; both runs at the same time."""
    command = [sys.executable, "-m", "tests.rollout.check_plugin"]
    pipe = subprocess.PIPE
    runs = {
        name: subprocess.Popen([*command, *words], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        for name, words in (("replaced", ()), ("original", ("--without",)))
    }
    figures = {}
    for name, process in runs.items():
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
        figures[name] = json.loads(output.splitlines()[-1])
    return figures


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, float]]:
    return run_both()


@pytest.fixture
def replaced(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    return figures["replaced"]


@pytest.fixture
def original(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    return figures["original"]


def test_same_as_a_loop() -> None:
    """Rejection sampling of random batches, written once more request by request."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        batch, longest, vocab = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(3))
        n = torch.randint(0, longest + 1, (batch,), generator=generator)
        total = int(n.sum())
        draft = torch.randint(-1, vocab, (total,), generator=generator, dtype=torch.int32)
        p = torch.rand(total, vocab, generator=generator).softmax(-1)
        inv_q = torch.rand(batch, vocab, generator=generator)
        uniform = torch.rand(total, generator=generator, dtype=torch.float64)
        bonus = torch.randint(0, vocab, (batch, 1), generator=generator, dtype=torch.int32)
        greedy = torch.rand(batch, generator=generator) < 0.3
        ends = n.cumsum(0).to(torch.int32)

        recovered = torch.empty_like(draft)
        cpu_sampling.sample_recovered(recovered, ends, draft, p, inv_q)
        output = torch.full((batch, longest + 1), -1, dtype=torch.int32)
        cpu_sampling.random_sample(output, ends, draft, p, bonus, recovered, uniform, greedy)

        at = 0
        for request, count in enumerate(n.tolist()):
            expected: list[int] = []
            for t in range(at, at + count):
                x = int(draft[t])
                if x >= 0 and p[t, x] > uniform[t]:
                    expected.append(x)
                    continue
                score = [float(p[t, v] * inv_q[request, v]) if v != x else -1.0 for v in range(vocab)]
                expected.append(score.index(max(score)))
                break
            else:
                expected.append(int(bonus[request]))
            at += count
            if bool(greedy[request]):
                expected = []
            assert output[request].tolist() == expected + [-1] * (longest + 1 - len(expected))


def test_jobs_do_not_share_memory_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for port in ("29500", "29501"):
        monkeypatch.setenv("MASTER_PORT", port)
        names.add(plugin.shared_memory_name("//-tp:0-[0-1]-cpushm"))
    assert len(names) == 2 and not any("/" in name for name in names)


@pytest.mark.engine
class TestReplacements:
    def test_values_are_expanded(self, replaced: dict[str, float]) -> None:
        assert replaced["expand_float32"] == replaced["expand_int32"] == replaced["expand_int64"] == 0

    def test_draws_follow_the_target(self, replaced: dict[str, float]) -> None:
        """p-values of chi-squared tests of all pairs of tokens, for each kind of draft: valid, placeholder, mixed."""
        tests = {name: value for name, value in replaced.items() if name.startswith("p_value")}
        assert len(tests) >= 6
        assert all(value > 1e-4 for value in tests.values()), tests

    def test_greedy_rows_are_exact(self, replaced: dict[str, float]) -> None:
        assert replaced["greedy_wrong"] == 0
        assert replaced["all_greedy_wrong"] == 0
        assert replaced["greedy_row_of_a_mixed_batch_wrong"] == 0

    def test_top_k_and_top_p_are_respected(self, replaced: dict[str, float]) -> None:
        assert replaced["outside_top_k"] == 0
        assert replaced["outside_top_p"] == 0

    def test_drafts_with_probabilities_keep_the_original_kernels(self, replaced: dict[str, float]) -> None:
        assert replaced["with_draft_probs_p_value"] > 1e-4

    def test_without_them_it_is_wrong(self, original: dict[str, float]) -> None:
        """Should this fail after an update of vLLM, the faults are gone there and so may be the replacements."""
        assert original["expand_float32"] > 0 and original["expand_int32"] > 0
        assert min(value for name, value in original.items() if name.startswith("p_value")) < 1e-12
