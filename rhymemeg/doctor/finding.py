"""What a check says. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad it is, in ascending order. UNKNOWN: could not be looked at here; that is no fault."""

    OK = 0
    UNKNOWN = 1
    WARNING = 2
    ERROR = 3

    @property
    def label(self) -> str:
        return {0: "ok", 1: "not checked", 2: "WARNING", 3: "ERROR"}[int(self)]


@dataclass(frozen=True)
class Finding:
    """`check` is the part that was looked at ("packages", "gpu 3", ...), `text` a sentence with what to do, if anything.
    `ranks` are those that say so (empty: this machine)."""

    level: Level
    check: str
    text: str
    ranks: tuple[int, ...] = ()


def merge(by_rank: Iterable[Iterable[Finding]]) -> list[Finding]:
    """Findings of all ranks, equal ones once, with the ranks that had them; the worst first, else in order of appearance."""
    ranks: dict[tuple[Level, str, str], list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for f in findings:
            found = ranks.setdefault((f.level, f.check, f.text), [])
            if rank not in found:
                found.append(rank)
    merged = [Finding(level, check, text, tuple(members)) for (level, check, text), members in ranks.items()]
    return sorted(merged, key=lambda f: -int(f.level))


def show_ranks(ranks: tuple[int, ...], world: int) -> str:
    """'all', or runs of numbers: '0-3, 8'."""
    if len(ranks) == world:
        return "all"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")


def table(findings: list[Finding], world: int) -> str:
    """One line a finding."""
    rows = [(f.level.label, f.check, show_ranks(f.ranks, world) if world > 1 else "", f.text) for f in findings]
    head = ("", "check", "ranks" if world > 1 else "", "")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(3)]
    lines = []
    for row in [head, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths) if width]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    return "\n".join(lines)


def exit_status(findings: Iterable[Finding], allow_warnings: bool = False) -> int:
    """0: nothing wrong; 1: warnings; 2: errors."""
    worst = max((f.level for f in findings), default=Level.OK)
    return 2 if worst == Level.ERROR else 1 if worst == Level.WARNING and not allow_warnings else 0
