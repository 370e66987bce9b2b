"""Log-probabilities and entropies from sharded logits against torch's own softmax."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rhymemeg.parallel import vocab_parallel
from rhymemeg.parallel.vocab_parallel import log_probs_and_entropy


class Ranks:
    """Stands in for a tensor-parallel group: threads of this process that add up what they all-reduce."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[Any] = [None] * size
        self.members = [Member(self, rank, size) for rank in range(size)]


class Member:
    def __init__(self, ranks: Ranks, rank: int, size: int) -> None:
        self._ranks, self._rank, self._size = ranks, rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def reduce(self, tensor: Tensor, op: Any) -> None:
        r = self._ranks
        r.parts[self._rank] = tensor.clone()
        r.barrier.wait()
        stacked = torch.stack(r.parts)
        tensor.copy_(stacked.amax(0) if op == torch.distributed.ReduceOp.MAX else stacked.sum(0))
        r.barrier.wait()


def expected(logits: Tensor, labels: Tensor, vocab: int, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits[..., :vocab].double() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 5), st.sampled_from([0.3, 1.0, 2.5]), st.booleans())
def test_values_and_gradients_on_one_rank(n: int, vocab: int, padding: int, temperature: float, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(n * 100 + vocab)
    logits = torch.randn(n, 2, vocab + padding, generator=generator, dtype=torch.float32) * 5
    labels = torch.randint(0, vocab, (n, 2), generator=generator)
    weights = torch.randn(2, n, 2, generator=generator)

    mine = logits.clone().requires_grad_()
    source = mine * 1  # a tensor that may be overwritten
    log_probs, entropy = log_probs_and_entropy(source, labels, vocab, temperature, None, in_place=in_place)
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()

    reference = logits.double().requires_grad_()
    wanted = expected(reference, labels, vocab, temperature)
    (wanted[0] * weights[0] + wanted[1] * weights[1]).sum().backward()
    torch.testing.assert_close(log_probs.double(), wanted[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=1e-5, atol=2e-5)
    assert mine.grad is not None and reference.grad is not None
    torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=2e-5)
    assert (mine.grad[..., vocab:] == 0).all()


@pytest.mark.parametrize("size", [2, 4])
def test_shards_agree_with_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 ranks of 4 columns and a vocabulary of 10, one rank holds padding only and one holds both."""
    monkeypatch.setattr(vocab_parallel, "_all_reduce", lambda tensor, op, group: group.reduce(tensor, op))
    monkeypatch.setattr(vocab_parallel, "ROWS", 3)  # several slices
    vocab, width, n = 10, 16 // size, 8
    logits = torch.randn(n, 16) * 4
    labels = torch.randint(0, vocab, (n,))
    weights = torch.randn(2, n)
    whole = logits.double().requires_grad_()
    wanted = expected(whole, labels, vocab, 0.7)
    (wanted[0] * weights[0] + wanted[1] * weights[1]).sum().backward()
    found: list[Any] = [None] * size

    def run(member: Member) -> None:
        rank = member.rank()
        shard = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        log_probs, entropy = log_probs_and_entropy(shard, labels, vocab, 0.7, member)  # type: ignore[arg-type]
        (log_probs * weights[0] + entropy * weights[1]).sum().backward()
        found[rank] = (log_probs.detach(), entropy.detach(), shard.grad)

    threads = [threading.Thread(target=run, args=(member,)) for member in Ranks(size).members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for log_probs, entropy, _ in found:
        torch.testing.assert_close(log_probs.double(), wanted[0].detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), wanted[1].detach(), rtol=1e-5, atol=1e-5)
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([g for *_, g in found], 1).double(), whole.grad, rtol=1e-4, atol=1e-5)


def test_only_log_probs_need_a_gradient() -> None:
    logits = torch.randn(3, 7, dtype=torch.float32, requires_grad=True)
    labels = torch.tensor([1, 0, 6])
    log_probs_and_entropy(logits, labels, 7, 1.0, None)[0].sum().backward()
    wanted = torch.nn.functional.one_hot(labels, 7) - logits.detach().softmax(-1)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-5, atol=1e-6)
