"""The simulator's command line: `python -m rhymemeg.histopipe.simulate --help`.

Runs each setting over the same steps and prints a line for it: speed (generated tokens a second, against the first
setting, `random` unless --settings says otherwise), idle share, time against the lower bound, stale, carried, early and
recompute shares. All are over the windows after --warmup.

Two lower bounds of the mean window, both over the same tokens:
    balance   every engine always runs as many requests as it gets of its even share, at the fastest rate
    longest   the longest response of each step alone on an engine; half of it where a response may span two windows
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np

from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.histopipe.cost import BUILT_IN, cost_model
from rhymemeg.histopipe.explain import explain
from rhymemeg.histopipe.record import WindowRecord, write_windows
from rhymemeg.histopipe.simulator import Setting, Simulator, Speculation
from rhymemeg.histopipe.workloads import HISTORIES, Lognormal, StepLengths, Trace, degrade, workload
from rhymemeg.observe.files import write_atomically

SETTINGS: dict[str, dict[str, Any]] = {
    "random": {"policy": "random", "steal": False},
    "strict-group": {"layout": "group"},
    "strict": {},
    "paper-parity": {
        "policy": "paper",
        "two_tier": False,
        "early": 1.0,
        "migrate": True,
        "carry": 0.05,
        "steal": False,
    },
    "paper": {"policy": "paper", "early": 1.0, "migrate": True, "carry": 0.05, "steal": False, "keep_place": True},
    "random-carry": {"policy": "random", "carry": 0.03},
    "complement-group": {"carry": 0.03, "early": 0.05, "layout": "group"},
    "complement": {"carry": 0.03, "early": 0.05},
    "pull": {"policy": "pull", "carry": 0.03, "early": 0.05},
    "pull-early": {"policy": "pull", "early": 1.0, "early_in_free_slots": True},
}
"""Named settings; `NAME:field=value,...` changes one."""


@dataclass(frozen=True)
class Summary:
    """One setting over the measured windows. Shares of samples are of a step's samples, shares of tokens of the tokens
    trained (stale) or generated (recompute)."""

    name: str
    speed: float
    tokens_per_second: float
    window_seconds: float
    idle_share: float
    bound_seconds: float
    bound_ratio: float
    balance_seconds: float
    longest_seconds: float
    stale_share: float
    carried_share: float
    early_share: float
    recompute_share: float
    stolen: float
    migrated: float
    rank_correlation: float
    trained_length: float
    """Mean length of trained samples over that of all samples drawn: 1 unless carrying biases lengths."""
    windows: int


def parse_setting(text: str, common: Setting) -> tuple[str, Setting]:
    """`complement`, or `complement:carry=0.02,layout=group`."""
    name, _, changes = text.partition(":")
    if name not in SETTINGS:
        raise ConfigError(f"--settings: {name!r} is none of {', '.join(SETTINGS)}")
    values = dict(SETTINGS[name])
    kinds = {f.name: type(getattr(common, f.name)) for f in fields(Setting)}
    for part in filter(None, changes.split(",")):
        key, _, value = part.partition("=")
        if kinds.get(key) not in (str, float, bool, int):
            raise ConfigError(f"--settings: {part!r}: no such field")
        try:
            values[key] = bool(int(value)) if kinds[key] is bool else kinds[key](value)
        except ValueError:
            raise ConfigError(f"--settings: {part!r}: not a value of {key}") from None
        if key in ("samples", "engines", "slots", "cap") and int(values[key]) < 1:
            raise ConfigError(f"--settings: {part!r}: less than 1")
    return text, replace(common, **values)


def bounds(setting: Setting, records: Sequence[WindowRecord], longest: Sequence[int]) -> tuple[float, float]:
    """Mean seconds a window of the two lower bounds (balance, longest)."""
    simulator = Simulator(setting)
    share = min(setting.slots, max(1, math.ceil(records[0].samples / setting.engines)))
    rates = [seconds / c for c, seconds in enumerate(simulator.seconds_per_token[: share + 1]) if c]
    balance = float(np.mean([r.generated_tokens for r in records])) / setting.engines * min(rates)
    spans = 2 if setting.carry or setting.early else 1
    return balance, float(np.mean(longest)) / spans * min(s for s in simulator.seconds_per_token[1:])


def run_setting(
    setting: Setting, source: Lognormal | Trace, history: str, prompts: int, windows: int, warmup: int, seed: int
) -> tuple[Simulator, list[WindowRecord], list[int]]:
    """The simulator after its windows, the measured records, and the longest response of each of their steps."""
    raw = source.steps(prompts, setting.samples, setting.cap, seed)
    steps: Iterator[StepLengths] = (degrade(step, history, seed) for step in raw)
    simulator = Simulator(setting)
    now = next(steps)
    records, longest = [], []
    for then in islice(steps, windows + warmup):
        records.append(simulator.run_window(now, then))
        longest.append(int(now.actual.max()))
        now = then
    return simulator, records[warmup:], longest[warmup:]


def summarise(
    name: str, setting: Setting, records: Sequence[WindowRecord], longest: Sequence[int], base: float
) -> Summary:
    """`base`: tokens a second of the setting that is compared with; 0: this one."""
    seconds = sum(r.seconds for r in records)
    generated = sum(r.generated_tokens for r in records)
    trained = sum(r.tokens for r in records)
    samples = sum(r.samples for r in records)
    per_step = samples / len(records)
    balance, alone = bounds(setting, records, longest)
    rate = generated / seconds
    return Summary(
        name=name,
        speed=rate / (base or rate),
        tokens_per_second=rate,
        window_seconds=seconds / len(records),
        idle_share=sum(sum(r.idle_seconds) for r in records) / (seconds * setting.engines),
        bound_seconds=max(balance, alone),
        bound_ratio=seconds / len(records) / max(balance, alone),
        balance_seconds=balance,
        longest_seconds=alone,
        stale_share=sum(r.stale_tokens for r in records) / trained,
        carried_share=float(np.mean([r.carried_out for r in records])) / per_step,
        early_share=float(np.mean([r.early_started for r in records])) / per_step,
        recompute_share=sum(r.recomputed_tokens for r in records) / generated,
        stolen=float(np.mean([r.stolen for r in records])),
        migrated=float(np.mean([r.migrated for r in records])),
        rank_correlation=float(np.mean([r.rank_correlation for r in records])),
        trained_length=trained / samples / float(np.mean([r.mean_length_started for r in records])),
        windows=len(records),
    )


def table(summaries: Sequence[Summary]) -> str:
    """For a terminal."""
    width = max(len(s.name) for s in summaries)
    head = f"{'setting':{width}}  speed  idle %  window s  / bound  stale %  carried %  early %  recompute %  length"
    rows = [
        f"{s.name:{width}}  {s.speed:5.2f}  {100 * s.idle_share:6.1f}  {s.window_seconds:8.1f}  {s.bound_ratio:7.2f}  "
        f"{100 * s.stale_share:7.1f}  {100 * s.carried_share:9.2f}  {100 * s.early_share:7.2f}  "
        f"{100 * s.recompute_share:11.1f}  {s.trained_length:6.3f}"
        for s in summaries
    ]
    bound = summaries[-1]
    tail = f"bounds of {bound.name}: balance {bound.balance_seconds:.1f} s, longest {bound.longest_seconds:.1f} s"
    return "\n".join([head, *rows, tail])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rhymemeg.histopipe.simulate",
        description="Simulate rollout windows under the trainer's planner.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--engines", type=int, default=32, help="engines, 1 to 4096")
    add("--prompts", type=int, default=0, help="prompts a step; 0: 8 an engine")
    add("--samples", type=int, default=16, help="samples a prompt")
    add(
        "--slots",
        type=int,
        default=64,
        help="requests an engine runs at once (the built-in profile was measured up to 64)",
    )
    add(
        "--lengths",
        default="lognormal:median=1160",
        help="lognormal:median=M,sigma=S,growth=G; a trace (.jsonl, .gz); samples/ of a run",
    )
    add("--length-scale", type=float, default=1.0, help="multiply a trace's lengths (8 for texts counted in words)")
    add("--cap", type=int, default=16384, help="longest response in tokens")
    add("--history", choices=HISTORIES, default="epoch", help="what the predictions are made from")
    add("--cost", default="a100-7b", help=f"built-in ({', '.join(BUILT_IN)}) or a profile file")
    add("--speculation", default="0", help="DRAFT:ACCEPT[:COVERAGE[:MAX_RUNNING]], e.g. 4:0.8; 0: off")
    add("--prompt-tokens", type=int, default=200, help="length of each prompt")
    add(
        "--settings",
        nargs="+",
        default=["random", "strict", "paper", "complement-group", "complement", "pull"],
        help=f"of {', '.join(SETTINGS)}; NAME:field=value,... changes one",
    )
    add("--carry", type=float, help="limit of rho for every setting that carries")
    add("--early", type=float, help="early share for every setting that has one below 1")
    add("--windows", type=int, default=12, help="measured windows")
    add("--warmup", type=int, default=2, help="windows before those")
    add("--seed", type=int, default=0, help="of lengths and of random orders")
    add("--json", metavar="FILE", help="write all numbers; - for standard output (instead of the table)")
    add("--plot", metavar="FILE", help="bars, and a Gantt chart of the last setting's last window")
    add("--plot-engines", type=int, default=8, help="engines in the Gantt chart and in --windows-file")
    add("--windows-file", metavar="FILE", help="write the last setting's windows.jsonl")
    add("--explain", action="store_true", help="print the last setting's last plan")
    return parser


def parse_speculation(text: str) -> Speculation:
    parts = text.split(":")
    try:
        draft = int(parts[0])
        if draft == 0:
            return Speculation()
        values = Speculation(
            draft,
            float(parts[1]),
            float(parts[2]) if len(parts) > 2 else 1.0,
            int(parts[3]) if len(parts) > 3 else 1 << 30,
        )
    except (ValueError, IndexError):
        raise ConfigError(f"--speculation: {text!r} is not DRAFT:ACCEPT[:COVERAGE[:MAX_RUNNING]]") from None
    if not 0 <= draft <= 1024 or not 0 <= values.accept < 1 or not 0 <= values.coverage <= 1 or len(parts) > 4:
        raise ConfigError(f"--speculation: {text!r}: want DRAFT 0 to 1024, 0 <= ACCEPT < 1, 0 <= COVERAGE <= 1")
    if values.max_running < 0:
        raise ConfigError(f"--speculation: {text!r}: want MAX_RUNNING >= 0")
    return values


def run(options: argparse.Namespace) -> int:
    for name, low, high in (
        ("engines", 1, 4096),
        ("prompts", 0, 1 << 20),
        ("samples", 1, 1 << 16),
        ("slots", 1, 1 << 16),
        ("cap", 1, 1 << 30),
        ("windows", 1, 1 << 20),
        ("warmup", 0, 1 << 20),
        ("prompt_tokens", 0, 1 << 30),
        ("plot_engines", 0, 4096),
        ("seed", 0, 1 << 63),
        ("length_scale", 1e-6, 1e6),
        ("carry", 0, 1),
        ("early", 0, 1),
    ):
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not between {low} and {high}")
    source = workload(options.lengths, options.length_scale)
    common = Setting(
        engines=options.engines,
        slots=options.slots,
        samples=options.samples,
        cap=options.cap,
        prompt_tokens=options.prompt_tokens,
        cost=cost_model(options.cost),
        speculation=parse_speculation(options.speculation),
        seed=options.seed,
    )
    settings = [parse_setting(text, common) for text in options.settings]
    summaries: list[Summary] = []
    simulator: Simulator | None = None
    records: list[WindowRecord] = []
    for i, (name, setting) in enumerate(settings):
        if options.carry is not None and setting.carry and not setting.migrate:
            setting = replace(setting, carry=options.carry)
        if options.early is not None and 0 < setting.early < 1:
            setting = replace(setting, early=options.early)
        if i == len(settings) - 1 and (options.plot or options.windows_file):
            setting = replace(setting, span_engines=options.plot_engines)
        prompts = options.prompts or 8 * options.engines
        simulator, records, longest = run_setting(
            setting, source, options.history, prompts, options.windows, options.warmup, options.seed
        )
        summaries.append(
            summarise(name, setting, records, longest, summaries[0].tokens_per_second if summaries else 0.0)
        )
    assert simulator is not None
    if options.json:
        content = {"options": vars(options), "settings": [_finite(asdict(s)) for s in summaries]}
        text = json.dumps(content, indent=1)
        if options.json == "-":
            print(text)
        else:
            write_atomically(options.json, text + "\n")
    if options.json != "-":
        print(table(summaries))
    if options.windows_file:
        write_windows(options.windows_file, records)
    if options.plot:
        from rhymemeg.histopipe.figures import comparison

        comparison(summaries, records[-1], options.plot)
    if options.explain and simulator.last_plan is not None and simulator.last_request is not None:
        print(explain(simulator.last_plan, simulator.last_request))
    return 0


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with one line that says what is wrong."""
    try:
        return run(_parser().parse_args(arguments))
    except RhymeMegError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
