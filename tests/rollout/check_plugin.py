"""Draw from vLLM's rejection sampler on CPU and print how far it is from the target, as one JSON line.

    python -m tests.rollout.check_plugin [--without]

`--without` leaves vLLM's own functions in place (and leaves out top-k and top-p, which may crash then). Every p-value
compares the *pair* of the first two emitted tokens with its exact probability.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from torch import Tensor

VOCAB, DRAWS = 7, 200_000


def chi_squared_p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's test; an outcome of probability 0 that occurs gives 0."""
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    counts, probabilities = counts[probabilities > 0].double(), probabilities[probabilities > 0].double()
    expected = counts.sum() * probabilities
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), statistic / 2))


def exact_pairs(draft: int, p: list[Tensor]) -> Tensor:
    """[VOCAB (VOCAB + 1)] probability of (first token, second token or VOCAB for none), where `draft` is the first
    draft. Only if it is emitted is there a second token, and that is drawn from p[1] whatever the second draft."""
    table = torch.zeros(VOCAB, VOCAB + 1, dtype=torch.float64)
    table[:, VOCAB] = p[0]
    if draft >= 0:
        table[draft, VOCAB] = 0
        table[draft, :VOCAB] = p[0][draft] * p[1]
    return table.flatten()


def main() -> None:
    """Print the figures."""
    from rhymemeg.rollout import plugin, vllm_compat

    vllm_compat.prepare_environment("cpu")
    import vllm.v1.sample.rejection_sampler as rs
    from vllm.platforms import current_platform

    with_replacements = "--without" not in sys.argv
    if with_replacements:
        plugin.register()
        plugin.register()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()

    figures: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)

    # Values a request -> values a token.
    cumulative = torch.tensor([2, 2, 3, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32, torch.int64):
        values = torch.tensor([3, 5, 0, 2], dtype=dtype)
        got = rs.expand_batch_to_tokens(values, cumulative, 6, replace_from=0, replace_to=1)
        wanted = torch.tensor([3, 3, 1, 2, 2, 2], dtype=dtype)
        figures[f"expand_{str(dtype).split('.')[1]}"] = float((got != wanted).sum())

    logits = [torch.randn(VOCAB, generator=generator) for _ in range(2)]
    p = [x.softmax(-1).double() for x in logits]
    bonus_p = torch.randn(VOCAB, generator=generator).softmax(-1)

    def draw(draft: list[int], *, temperature: Tensor, draft_probs: Tensor | None = None, **kind: bool) -> Tensor:
        """[DRAWS, 3] emitted tokens of DRAWS requests with the same two drafts."""
        bonus = torch.multinomial(bonus_p, DRAWS, True).to(torch.int32)[:, None]
        metadata = SimpleNamespace(all_greedy=False, all_random=False, temperature=temperature, generators={})
        vars(metadata).update(kind)
        tokens = torch.tensor(draft, dtype=torch.int32).repeat(DRAWS)
        ends = torch.arange(1, DRAWS + 1, dtype=torch.int32) * 2
        target = torch.stack(logits).repeat(DRAWS, 1)
        return rs.rejection_sample(tokens, [2] * DRAWS, 2, ends, draft_probs, target, bonus, metadata)

    def pairs(out: Tensor) -> Tensor:
        """Counts [VOCAB, VOCAB + 1] of the first two tokens; a missing first token counts as outcome of probability
        0."""
        first, second = out[:, 0].long(), out[:, 1].long()
        if bool((first < 0).any()):
            first = torch.where(first < 0, 0, first)
            second = torch.where(out[:, 0] < 0, 0, second)
        second = torch.where(second < 0, VOCAB, second)
        return torch.bincount(first * (VOCAB + 1) + second, minlength=VOCAB * (VOCAB + 1))

    ones = torch.ones(DRAWS)
    for draft in ([2, 4], [-1, 4], [0, 6], [0, -1], [-1, -1], [3, 3]):
        out = draw(draft, temperature=ones, all_random=True)
        name = "_".join(map(str, draft))
        figures[f"p_value_{name}"] = chi_squared_p_value(pairs(out), exact_pairs(draft[0], p))
        # The third token is the bonus, exactly where both drafts were accepted.
        third = out[:, 2]
        both = (out[:, 0] == draft[0]) & (out[:, 1] == draft[1]) & (torch.tensor(draft) >= 0).all()
        figures[f"p_value_bonus_{name}"] = 1.0 if bool((both == (third >= 0)).all()) else 0.0
        if bool(both.any()):
            counts = torch.bincount(third[third >= 0].long(), minlength=VOCAB)
            figures[f"p_value_third_{name}"] = chi_squared_p_value(counts, bonus_p)

    # Greedy: the longest agreeing run of drafts, then the argmax. One row in two of a mixed batch is greedy.
    best = [int(x.argmax()) for x in logits]
    zeros = torch.zeros(DRAWS)
    for name, all_greedy in (("greedy", False), ("all_greedy", True)):
        out = draw([best[0], (best[1] + 1) % VOCAB], temperature=zeros, all_greedy=all_greedy)
        figures[f"{name}_wrong"] = float((out != torch.tensor([best[0], best[1], -1])).any(1).sum())
    mixed = torch.arange(DRAWS).remainder(2).float()
    out = draw([best[0], -1], temperature=mixed)
    wrong = (out[mixed == 0] != torch.tensor([best[0], best[1], -1])).any(1).sum()
    figures["greedy_row_of_a_mixed_batch_wrong"] = float(wrong)
    table = exact_pairs(best[0], p)
    figures["p_value_random_row_of_a_mixed_batch"] = chi_squared_p_value(pairs(out[mixed == 1]), table)

    # Temperature, top-k and top-p differ from request to request; the draft is a token that they exclude.
    worst = [int(x.argmin()) for x in logits]
    for name, top_k, top_p in (("top_k", 2, None), ("top_p", None, 0.8)) if with_replacements else ():
        metadata = SimpleNamespace(
            all_greedy=False,
            all_random=True,
            temperature=torch.full((DRAWS,), 0.7),
            generators={},
            top_k=None if top_k is None else torch.full((DRAWS,), top_k, dtype=torch.int32),
            top_p=None if top_p is None else torch.full((DRAWS,), top_p),
        )
        ends = torch.arange(1, DRAWS + 1, dtype=torch.int32) * 2
        target = rs.apply_sampling_constraints(torch.stack(logits).repeat(DRAWS, 1), ends, metadata)
        tokens = torch.tensor(worst, dtype=torch.int32).repeat(DRAWS)
        bonus = torch.zeros(DRAWS, 1, dtype=torch.int32)
        out = rs.rejection_sample(tokens, [2] * DRAWS, 2, ends, None, target, bonus, metadata)
        scaled = (logits[0].double() / 0.7).softmax(-1)
        order = scaled.sort(descending=True)
        keep = top_k or int((order.values.cumsum(0) < (top_p or 0)).sum()) + 1
        allowed = torch.zeros(VOCAB, dtype=torch.float64)
        allowed[order.indices[:keep]] = scaled[order.indices[:keep]]
        counts = torch.bincount(out[:, 0].long().clamp(min=0), minlength=VOCAB)
        figures[f"outside_{name}"] = float(counts[allowed == 0].sum()) + float((out[:, 0] < 0).sum())
        figures[f"p_value_{name}"] = chi_squared_p_value(counts, allowed / allowed.sum())

    # A draft model's probabilities: drafts drawn from q, the emitted token must still follow p.
    q = torch.randn(VOCAB, generator=generator).softmax(-1)
    drafts = torch.multinomial(q, DRAWS, True).to(torch.int32)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=ones, generators={})
    out = rs.rejection_sample(
        drafts, [1] * DRAWS, 1, torch.arange(1, DRAWS + 1, dtype=torch.int32), q.repeat(DRAWS, 1),
        logits[0].repeat(DRAWS, 1), torch.zeros(DRAWS, 1, dtype=torch.int32), metadata,
    )  # fmt: skip
    figures["with_draft_probs_p_value"] = chi_squared_p_value(torch.bincount(out[:, 0].long(), minlength=VOCAB), p[0])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
