"""A plan as text: who gets what, and why. Pure.

Lines are written for a person who asks why one engine got one prompt: what was predicted, what the engine carried, what
it will be busy for, and what the window's rules allow.
"""

from __future__ import annotations

import numpy as np

from rhymemeg.histopipe.plan import Plan, PlanRequest
from rhymemeg.histopipe.predict import bounded_growth

REASONS = {
    "random": "prompts in an order drawn from (seed, step, prompt id), cut into equal parts",
    "paper": "ranking groups by median length; more engines for longer groups; order mirrored on even steps",
    "complement": "longest first, each round's longest to the engine that is free earliest with what it already has",
    "pull": "one queue, longest first; an engine with a free slot takes the next",
}


def explain(plan: Plan, request: PlanRequest, engines: int = 16, prompts: int = 8) -> str:
    """`engines`: how many are described; `prompts`: how many of each engine's prompts are named."""
    p = plan.prediction
    total = len(plan.prompt_ids) * plan.samples_per_prompt
    lines = [
        f"step {plan.step}: {len(plan.prompt_ids)} prompts x {plan.samples_per_prompt} samples on {plan.num_engines} "
        f"engines of {plan.slots} slots, policy {plan.policy}, layout {plan.layout}, plan {plan.digest}",
        f"why: {REASONS[plan.policy]}",
        _predictions(plan, request),
        f"window: closes when at most {plan.max_unfinished} of {total} samples are unfinished, all of them begun in it"
        if plan.max_unfinished
        else "window: closes when every sample is complete (strict)",
        f"resumed: {len(plan.resumed)} responses with {int(plan.resumed.tokens.sum())} tokens, {plan.moved} on another "
        f"engine; started early or complete already: {total - len(plan.queue)} of this step's samples",
    ]
    if len(plan.early):
        lines.append(
            f"early: {len(plan.early)} samples of step {plan.step + 1}, shortest first served, for idle engines"
        )
    if plan.groups is not None:
        g = plan.groups
        lines.append(f"ranking groups, targets rising by {g.slope:.3g} s an engine:")
        for i in range(len(g.engines)):
            lines.append(
                f"  group {i}: {int((g.of_prompt == i).sum())} prompts on {int(g.engines[i])} engines from position "
                f"{int(g.first_engine[i])}, {g.seconds[i]:.3g} s predicted, {g.target[i]:.3g} s targeted"
            )
    if plan.shared:
        lines.append(f"queue: {len(plan.queue)} samples: " + _prompts(plan, plan.queue.row, prompts))
        parts = []
    else:
        busy = plan.engine_seconds
        lines.append(
            f"predicted busy time: {busy.min():.3g} to {busy.max():.3g} s, mean {busy.mean():.3g} s "
            f"({100 * (1 - busy.mean() / busy.max()) if busy.max() > 0 else 0:.1f} % idle if predictions held)"
        )
        parts = list(range(min(engines, plan.num_engines)))
    for e in parts:
        row, _ = plan.queue.part(e)
        carried = slice(int(plan.resumed_offsets[e]), int(plan.resumed_offsets[e + 1]))
        rest = plan.resumed_remaining[carried]
        carrying = f"carries {len(rest)} with about {int(rest.sum())} tokens to go" if len(rest) else "carries nothing"
        lines.append(
            f"engine {e}: {carrying}; {len(row)} new with about {int(p.mean[row].sum())} tokens; "
            f"busy for about {plan.engine_seconds[e]:.3g} s; starts " + _prompts(plan, row, prompts)
        )
    if len(parts) < plan.num_engines and not plan.shared:
        lines.append(f"... and {plan.num_engines - len(parts)} more engines")
    return "\n".join(lines)


def _predictions(plan: Plan, request: PlanRequest) -> str:
    p, f = plan.prediction, request.feedback
    if plan.policy == "random":
        return "predictions: not used"
    if not f.trusted:
        return f"predictions: not used, since last ones ranked no better than chance ({f.rank_correlation:.2f})"
    known = int(p.known.sum())
    if known == 0:
        return "predictions: none, no prompt has a history"
    low, mid, high = np.percentile(p.mean, (10, 50, 90))
    return (
        f"predictions: {known} of {len(p.known)} prompts have a history (the rest get the median), growth "
        f"{bounded_growth(f.growth):.2f}; "
        f"mean length by prompt: 10 % below {low:.0f}, half below {mid:.0f}, 90 % below {high:.0f} tokens"
    )


def _prompts(plan: Plan, rows: np.ndarray, most: int) -> str:
    """`7 (2.1k) x3, ...`: prompt id, predicted mean length, samples in a row."""
    if len(rows) == 0:
        return "nothing"
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    counts = np.diff(starts, append=len(rows))
    parts = [
        f"{int(plan.prompt_ids[rows[s]])} ({plan.prediction.mean[rows[s]]:.0f} tokens)" + (f" x{n}" if n > 1 else "")
        for s, n in zip(starts[:most].tolist(), counts[:most].tolist())
    ]
    return ", ".join(parts) + (f", ... {len(starts) - most} more" if len(starts) > most else "")
