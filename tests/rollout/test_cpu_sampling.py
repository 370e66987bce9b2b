"""Verification of a whole step: the same as a loop over requests, and the exact distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rhymemeg.rollout.cpu_sampling import verify
from tests.rollout.check_plugin import chi_squared_p_value, exact_pairs

VOCAB = 7


def draw_by_seed(logits: Tensor, seeds: Tensor) -> Tensor:
    """Gumbel's way, the noise of each row from its seed."""
    noise = [torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(s)) for s in seeds.tolist()]
    return (logits - (-torch.stack(noise).log()).log()).argmax(-1)


def draw(logits: Tensor, seeds: Tensor) -> Tensor:
    return (logits - (-torch.rand(logits.shape).log()).log()).argmax(-1)


def test_same_as_a_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    for trial in range(200):
        batch, longest, vocab = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(3))
        vocab += 1
        n = torch.randint(0, longest + 1, (batch,), generator=generator)
        draft = torch.randint(-1, vocab, (int(n.sum()),), generator=generator, dtype=torch.int32)
        logits = torch.randn(int(n.sum()) + batch, vocab, generator=generator)
        temperature = torch.tensor([0.0, 0.5, 1.0, 2.0])[torch.randint(0, 4, (batch,), generator=generator)]
        greedy = trial % 5 == 0
        got = verify(
            logits.clone(), draft, n.tolist(), temperature=None if greedy else temperature,
            generators={r: torch.Generator().manual_seed(r) for r in range(batch)}, draw=draw_by_seed,
        )  # fmt: skip
        width = got.tokens.shape[1]
        log_probs, ranks = got.log_probs.view(batch, width), got.ranks.view(batch, width)
        row = at = 0
        for r, count in enumerate(n.tolist()):
            t = 0.0 if greedy else float(temperature[r])
            uniform = torch.rand(count + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
            expected: list[int] = []
            scores: list[float] = []
            for j in range(count + 1):
                scaled = logits[row + j] / (t or 1.0)
                p = scaled.softmax(-1)
                x = int(draft[at + j]) if j < count else -1
                if x >= 0 and (x == int(scaled.argmax()) if t == 0 else p[x] > uniform[j]):
                    expected.append(x)
                else:
                    if x >= 0:
                        scaled = scaled.index_fill(0, torch.tensor(x), -torch.inf)
                    seed = (uniform[-1:] * 2**31).long()
                    expected.append(int(scaled.argmax() if t == 0 else draw_by_seed(scaled[None], seed)))
                scores.append(float(p[expected[-1]].log()))
                assert int(ranks[r, j]) == int((p >= p[expected[-1]]).sum())
                if expected[-1] != x:
                    break
                # A refused draft is never drawn again, so the token drawn after it differs from it.
            row, at = row + count + 1, at + count
            assert got.tokens[r].tolist() == expected + [-1] * (width - len(expected))
            torch.testing.assert_close(log_probs[r, : len(expected)], torch.tensor(scores), atol=1e-5, rtol=1e-5)
        assert int((got.tokens >= 0).sum(1).max()) == width


@pytest.mark.parametrize("draft", [[2, 4], [-1, 4], [0, 6], [0, -1], [-1, -1], [3, 3], []])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_target(draft: list[int], temperature: float) -> None:
    """Pairs of the first two tokens of many requests with the same drafts, against their exact probabilities."""
    torch.manual_seed(5)
    draws = 50_000
    logits = torch.randn(len(draft) + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    out = verify(
        logits.repeat(draws, 1), torch.tensor(draft, dtype=torch.int32).repeat(draws), [len(draft)] * draws,
        temperature=torch.full((draws,), temperature), generators={}, draw=draw,
    ).tokens.long()  # fmt: skip
    out = torch.nn.functional.pad(out, (0, 2), value=-1)
    second = torch.where(out[:, 1] < 0, VOCAB, out[:, 1])
    pairs = torch.bincount(out[:, 0] * (VOCAB + 1) + second, minlength=VOCAB * (VOCAB + 1))
    p = [(row / temperature).double().softmax(-1) for row in logits]
    exact = exact_pairs(draft[0] if draft else -1, [p[0], p[-1] if len(draft) < 2 else p[1]])
    assert chi_squared_p_value(pairs, exact) > 1e-4


def test_what_top_k_leaves_out_is_never_emitted() -> None:
    torch.manual_seed(6)
    draws, kept = 20_000, 2
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    order = logits[0].argsort(descending=True)

    def top_k(rows: Tensor) -> Tensor:
        return rows.masked_fill(rows < rows.topk(kept, -1).values[:, -1:], -torch.inf)

    for x in (int(order[0]), int(order[-1])):  # a draft that is kept, and one that is left out
        out = verify(
            logits.repeat(draws, 1), torch.tensor([x], dtype=torch.int32).repeat(draws), [1] * draws,
            temperature=torch.ones(draws), generators={}, draw=draw, restrict=top_k,
        )  # fmt: skip
        exact = top_k(logits)[0].double().softmax(-1)
        counts = torch.bincount(out.tokens[:, 0].long(), minlength=VOCAB)
        assert counts[order[kept:]].sum() == 0
        assert chi_squared_p_value(counts, exact) > 1e-4
        first = out.log_probs.view(draws, -1)[:, 0]
        torch.testing.assert_close(first, exact.log().float()[out.tokens[:, 0].long()])


def test_draws_of_a_request_do_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(8, VOCAB, generator=generator)
    draft = torch.tensor([1, 2, 3, 4], dtype=torch.int32)

    def tokens(rows: slice, drafts: slice, n: list[int], seeds: list[int]) -> list[list[int]]:
        return verify(
            logits[rows], draft[drafts], n, temperature=torch.ones(len(n)),
            generators={r: torch.Generator().manual_seed(s) for r, s in enumerate(seeds)}, draw=draw_by_seed,
        ).tokens.tolist()  # fmt: skip

    together = tokens(slice(0, 8), slice(0, 4), [1, 0, 2, 1], [11, 12, 13, 14])
    alone = tokens(slice(3, 6), slice(1, 3), [2], [13])
    assert [t for t in together[2] if t >= 0] == [t for t in alone[0] if t >= 0]
