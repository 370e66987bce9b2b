"""Counters of drafting, and the watchdog of acceptance. Pure.

The numbers that papers mix are kept apart, each under its own name:

    histospec/coverage                  request-steps with a draft / request-steps
    histospec/acceptance                accepted / drafted tokens
    histospec/tokens_per_request_step   emitted tokens / request-steps (1 without speculation)
    histospec/drafted, /accepted        tokens
    histospec/request_steps             decode steps summed over requests (the step that ends a prefill is not one)
    histospec/match_length              mean length of the suffixes that drafts were found with
    histospec/draft_us_per_request      microseconds of drafting a request-step, appending and choosing included
    histospec/verify_cost               mean T(c, q) / T(c, c) of the steps, by the cost model
    histospec/index_bytes_per_token, /history_bytes_per_token, /index_bytes, /history_bytes, /history_evicted
    histospec/watchdog                  1 if acceptance collapsed after the last weight update
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Sums since they were last taken; sums of several engines add up."""

    steps: int = 0
    request_steps: int = 0
    covered: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    proposals: int = 0
    match_tokens: int = 0
    draft_ns: int = 0
    draft_rows: int = 0
    verify_cost: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def metrics(self) -> dict[str, float]:
        """The ratios of the module, under their names."""

        def ratio(a: float, b: float) -> float:
            return a / b if b else 0.0

        return {
            "histospec/coverage": ratio(self.covered, self.request_steps),
            "histospec/acceptance": ratio(self.accepted, self.drafted),
            "histospec/tokens_per_request_step": ratio(self.tokens, self.request_steps),
            "histospec/drafted": float(self.drafted),
            "histospec/accepted": float(self.accepted),
            "histospec/request_steps": float(self.request_steps),
            "histospec/match_length": ratio(self.match_tokens, self.proposals),
            "histospec/draft_us_per_request": ratio(self.draft_ns / 1000, self.draft_rows),
            "histospec/verify_cost": ratio(self.verify_cost, self.steps),
        }


class Watchdog:
    """Warns when acceptance after a weight update falls under `floor` times its own moving average.

    Drafts come from the policy's own past, so a policy that suddenly rejects them has changed more than training changes
    it: in practice an update that went wrong. One figure a weight version: `update` is called once a window with the
    window's counts, and needs `minimum` drafted tokens to judge or to learn.
    """

    def __init__(self, floor: float = 0.6, rate: float = 0.3, minimum: int = 500) -> None:
        self.floor, self.rate, self.minimum = floor, rate, minimum
        self.average: float | None = None

    def update(self, version: int, drafted: int, accepted: int) -> str | None:
        """The warning, or None."""
        if drafted < self.minimum:
            return None
        acceptance = accepted / drafted
        average = self.average
        if average is not None and acceptance < self.floor * average:
            return (  # the average keeps its value, so that the next window is judged by the same measure
                f"acceptance of drafts fell to {acceptance:.2f} with weight version {version}, from an average of "
                f"{average:.2f}: the policy rejects its own history, which usually means a broken weight update"
            )
        self.average = acceptance if average is None else (1 - self.rate) * average + self.rate * acceptance
        return None
