"""Verification of drafts on CPU: which drafted tokens are accepted, and what follows them. Torch and numpy only.

All of it follows "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192, algorithm 1) for a
deterministic draft, q = one-hot(x): accept x with probability p(x), otherwise draw from p without x; all accepted: draw
one token more from p. p is the distribution after temperature, top-k and top-p. A placeholder (-1, where the scheduler
has no draft) has p = 0, so it is refused and nothing is taken out of p. At temperature 0, p is one-hot(argmax).

`verify` does a whole step at once. It computes what is emitted and no more: one token is drawn a request, from the one
row that needs it, and log-probabilities are those of emitted tokens. `expand`, `random_sample` and `sample_recovered`
stand in for single kernels of vLLM's own way, which remains for requests with penalties, banned words and the like.
`rollout.plugin` says what is wrong with the originals.

B requests with n_r drafts each, T in all; V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------- whole step


class Verified(NamedTuple):
    """What B requests emit. `tokens` [B, longest] int32, -1 after the last one. For each entry of `tokens`, row by row:
    its log-probability, [B longest] float32, and its rank, [B longest] int64 (how many tokens are at least as
    probable); meaningless where the token is -1."""

    tokens: Tensor
    log_probs: Tensor
    ranks: Tensor


def verify(
    logits: Tensor,
    draft: Tensor,
    num_draft: Sequence[int],
    *,
    temperature: Tensor | None,
    generators: Mapping[int, torch.Generator],
    draw: Callable[[Tensor, Tensor], Tensor],
    restrict: Callable[[Tensor], Tensor] | None = None,
) -> Verified:
    """Verify the drafts of one engine step.

    logits       [T + B, V] float32; request r has n_r + 1 rows, one after the other: row j gives the token after its
                 first j drafts. May be overwritten if `restrict` is given.
    draft        [T] int32, -1 for a placeholder
    temperature  [B]; 0: greedy; None: all greedy
    generators   by request; others use torch's global one. A request's draws depend on its own generator and on the
                 length of its draft alone.
    draw         (logits [B, V], seeds [B] int64 in [0, 2**31)) -> [B] tokens with probabilities softmax(logits)
    restrict     top-k and top-p: sets what is left out to -inf, after the temperature
    """
    n = np.asarray(num_draft, dtype=np.int64)
    ends = np.cumsum(n + 1)
    starts, rows = ends - n - 1, int(ends[-1])
    request = np.repeat(np.arange(len(n)), n + 1)
    drafted = np.ones(rows, dtype=bool)  # rows that have a draft; the last one of a request has none
    drafted[ends - 1] = False
    token = np.full(rows, -1, dtype=np.int64)
    token[drafted] = draft.numpy()

    greedy = np.ones(len(n), dtype=bool)
    if temperature is not None:
        greedy = (temperature == 0).numpy()
        if bool((temperature.ne(1) & temperature.ne(0)).any()):
            scale = torch.where(temperature == 0, 1.0, temperature)
            logits = logits / scale[torch.from_numpy(request)].unsqueeze(1)
        if restrict is not None:
            logits = restrict(logits)
    log_p = logits.log_softmax(-1)

    accepted = np.zeros(rows, dtype=bool)
    real = np.flatnonzero(token >= 0)
    if greedy.any():
        best = logits.argmax(-1).numpy()
        accepted = (token == best) & greedy[request]
    if not greedy.all():
        uniform = _uniform(rows, n, generators)
        p = log_p[torch.from_numpy(real), torch.from_numpy(token[real])].double().exp().numpy()
        accepted[real] |= (p > uniform[real]) & ~greedy[request[real]]

    # The row after the accepted ones: the first that refused its draft or had none.
    refusing = np.flatnonzero(~accepted)
    last = refusing[np.searchsorted(refusing, starts)]
    final = logits[torch.from_numpy(last)]
    refused = np.flatnonzero(token[last] >= 0)
    final[torch.from_numpy(refused), torch.from_numpy(token[last[refused]])] = -torch.inf
    if greedy.all():
        drawn = best[last]
    else:
        seeds = torch.from_numpy((uniform[ends - 1] * 2**31).astype(np.int64))
        drawn = draw(final, seeds).numpy()
        if greedy.any():
            drawn = np.where(greedy, best[last], drawn)
    token[last] = drawn

    emitted = np.flatnonzero(np.arange(rows) <= last[request])
    width = int((last - starts).max()) + 1
    place = request[emitted] * width + emitted - starts[request[emitted]]
    where, what = torch.from_numpy(emitted), torch.from_numpy(token[emitted])
    values = log_p[where, what]
    tokens = torch.full((len(n) * width,), -1, dtype=torch.int32)
    log_probs = torch.zeros(len(n) * width)
    ranks = torch.zeros(len(n) * width, dtype=torch.int64)
    at = torch.from_numpy(place)
    tokens[at] = what.int()
    log_probs[at] = values
    ranks[at] = (log_p[where] >= values.unsqueeze(1)).sum(-1)
    return Verified(tokens.view(len(n), width), log_probs, ranks)


def _uniform(rows: int, n: np.ndarray, generators: Mapping[int, torch.Generator]) -> np.ndarray:
    """[rows] numbers in [0, 1): for each request one a draft, and one more for the token drawn after them."""
    if len(generators) < len(n):
        uniform = torch.rand(rows, dtype=torch.float64)
    else:
        uniform = torch.empty(rows, dtype=torch.float64)
    for request, own in enumerate(uniform.split((n + 1).tolist())):
        generator = generators.get(request)
        if generator is not None:
            own.uniform_(generator=generator)
    return uniform.numpy()


# -------------------------------------------------------------------------------------------------------- single kernels


def counts(cumulative: Tensor) -> Tensor:
    """[B] cumulative counts -> [B] counts, int64."""
    cumulative = cumulative.long()
    return torch.diff(cumulative, prepend=cumulative.new_zeros(1))


def expand(output: Tensor, input: Tensor, cu_num_tokens: Tensor, replace_from: float, replace_to: float) -> None:
    """output[t] = input[r] for every token t of request r, with `replace_from` replaced by `replace_to`."""
    value = torch.where(input == replace_from, torch.full_like(input, replace_to), input)
    output.copy_(torch.repeat_interleave(value, counts(cu_num_tokens), output_size=output.shape[0]))


def random_sample(
    output: Tensor, cu_num_draft: Tensor, draft: Tensor, target_probs: Tensor, bonus: Tensor, recovered: Tensor,
    uniform: Tensor, is_greedy: Tensor,
) -> None:  # fmt: skip
    """Rejection sampling of requests with at most S drafts each.

    output [B, S + 1] int32, -1 where nothing is emitted; rows of greedy requests are left alone
    draft, recovered, uniform [T]; target_probs [T, V]; bonus [B]
    """
    batch, width = output.shape
    n = counts(cu_num_draft)
    row = torch.repeat_interleave(torch.arange(batch), n, output_size=draft.shape[0])
    column = torch.arange(draft.shape[0]) - (cu_num_draft.long() - n)[row]
    p = target_probs.gather(1, draft.long().clamp(min=0).unsqueeze(1)).squeeze(1)
    accepted = torch.zeros(batch, width, dtype=torch.bool)
    accepted[row, column] = (draft >= 0) & (p > uniform)
    length = accepted.cumprod(1, dtype=torch.int64).sum(1)  # accepted drafts before the first refusal
    tokens = torch.zeros(2, batch, width, dtype=output.dtype)  # drafts, and what follows a refusal
    tokens[0, row, column] = draft.to(output.dtype)
    tokens[1, row, column] = recovered.to(output.dtype)
    tokens[1, torch.arange(batch), n] = bonus.view(-1).to(output.dtype)
    at = torch.arange(width)
    emitted = torch.where(at < length[:, None], tokens[0], output.new_full((), -1))
    emitted.scatter_(1, length[:, None], tokens[1].gather(1, length[:, None]))
    torch.where(is_greedy[:, None], output, emitted, out=output)


def sample_recovered(output: Tensor, cu_num_draft: Tensor, draft: Tensor, target_probs: Tensor, inv_q: Tensor) -> None:
    """output[t] ~ p_t without draft[t] (p_t itself where the draft is a placeholder), by the exponential race
    argmax p / q. inv_q [B, V] holds 1 / q, one row a request: at most one position of a request uses its draw."""
    row = torch.repeat_interleave(torch.arange(inv_q.shape[0]), counts(cu_num_draft), output_size=draft.shape[0])
    score = target_probs * inv_q[row]
    real = (draft >= 0).nonzero().squeeze(1)
    score[real, draft[real].long()] = -1
    output.copy_(score.argmax(-1))
