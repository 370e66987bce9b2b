"""The display on rank 0: a live panel on a terminal, a line a step elsewhere, or nothing.

`Display` is told what happens (`phase`, `progress`, `step`, `note`) and never asks; it keeps no state that training
depends on. All other ranks use a display that is off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as block characters, scaled to their own range; '' for none."""
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(SPARKS[round((v - low) / span * (len(SPARKS) - 1))] for v in values)


class Display:
    """`mode` as the option --display; 'auto' is live on a terminal and lines elsewhere."""

    def __init__(self, mode: Literal["auto", "live", "lines", "off"], total_steps: int, title: str) -> None:
        if mode == "auto":
            mode = "live" if sys.stdout.isatty() else "lines"
        self.mode = mode
        self.total_steps = total_steps
        self.title = title
        self._phase, self._phase_start, self._detail = "starting", time.monotonic(), ""
        self._last: Mapping[str, float] = {}
        self._step = 0
        self._rewards: list[float] = []
        self._live: Any = None
        if mode == "live":
            from rich.console import Console
            from rich.live import Live

            # Renders from its own thread, so the clock of the current phase runs while the main thread works.
            self._live = Live(get_renderable=self._panel, console=Console(), refresh_per_second=4, transient=False)
            self._live.start()

    def phase(self, name: str) -> None:
        """A phase of the step begins."""
        self._phase, self._phase_start, self._detail = name, time.monotonic(), ""
        if self.mode == "lines" and self._step == 0 and not self._last:
            print(f"[{name}]", flush=True)

    def progress(self, detail: str) -> None:
        """What the current phase has done so far, in a few words."""
        self._detail = detail

    def note(self, text: str) -> None:
        """A line that stays on the screen."""
        if self.mode == "live":
            self._live.console.print(text, highlight=False)
        elif self.mode == "lines":
            print(text, flush=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended with these numbers."""
        self._step, self._last = step + 1, metrics
        self._rewards.append(metrics.get("reward/mean", float("nan")))
        if self.mode == "lines":
            print(self._line(metrics, step), flush=True)

    def _line(self, m: Mapping[str, float], step: int) -> str:
        parts = [
            f"step {step + 1:>4}/{self.total_steps}",
            f"reward {m.get('reward/mean', 0):.3f}",
            f"len {m.get('rollout/response_len_mean', 0):.0f} (max {m.get('rollout/response_len_max', 0):.0f})",
            f"{m.get('perf/rollout_tokens_per_sec', 0):,.0f} tok/s",
            f"step {m.get('perf/step_time', 0):.1f}s =",
            " ".join(
                f"{k.removeprefix('timing_s/')} {v:.1f}"
                for k, v in m.items()
                if k.startswith("timing_s/") and v >= 0.05
            ),
            f"| logp diff {m.get('actor/train_rollout_logprob_abs_diff', 0):.1e}",
        ]
        if m.get("histopipe/idle_share", 0) >= 0.005:
            parts.append(f"| idle {100 * m['histopipe/idle_share']:.0f} %")
        if "histospec/tokens_per_request_step" in m:
            parts.append(f"| {m['histospec/tokens_per_request_step']:.1f} tokens a step")
        if "eval/reward" in m:
            parts.append(f"| held-out {m['eval/reward']:.3f} ± {m.get('eval/reward_se', 0):.3f}")
        return "  ".join(parts)

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        m = self._last
        now = Text.assemble(
            ("now  ", "dim"),
            (f"{self._phase} ", "bold cyan"),
            f"{time.monotonic() - self._phase_start:.0f}s  {self._detail}",
        )
        grid = Table.grid(padding=(0, 3))
        for _ in range(4):
            grid.add_column()
        for row in (
            ("reward", f"{m.get('reward/mean', 0):.3f}", "tokens/s", f"{m.get('perf/rollout_tokens_per_sec', 0):,.0f}"),
            ("length mean / max", f"{m.get('rollout/response_len_mean', 0):.0f} / {m.get('rollout/response_len_max', 0):.0f}",
             "truncated", f"{100 * m.get('rollout/truncated', 0):.1f} %"),
            ("logp difference", f"{m.get('actor/train_rollout_logprob_abs_diff', 0):.1e}",
             "held-out", f"{m['eval/reward']:.3f}" if "eval/reward" in m else "-"),
            ("engines idle", f"{100 * m.get('histopipe/idle_share', 0):.1f} %",
             "tokens a step", f"{m.get('histospec/tokens_per_request_step', 1):.2f}"),
        ):  # fmt: skip
            grid.add_row(Text(row[0], style="dim"), row[1], Text(row[2], style="dim"), row[3])
        total = sum(v for k, v in m.items() if k.startswith("timing_s/")) or 1.0
        phases = Text("  ".join(
            f"{k.removeprefix('timing_s/')} {v:.1f}s ({100 * v / total:.0f}%)"
            for k, v in m.items() if k.startswith("timing_s/") and v / total >= 0.005
        ), style="dim")  # fmt: skip
        bar = Table.grid(padding=(0, 1))
        bar.add_row(f"step {self._step}/{self.total_steps}", ProgressBar(self.total_steps or 1, self._step, width=50))
        spark = Text("reward " + sparkline([r for r in self._rewards if r == r]), style="green")
        return Panel(Group(bar, grid, spark, phases, now), title=self.title, title_align="left")

    def close(self) -> None:
        """Leave the terminal as it was; the last panel stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None
