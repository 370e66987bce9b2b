"""Rounds of measurements, each group of probes in a process of its own, all children of this one.

With one source tree the groups take turns, round after round. With two (`against`), each round measures both, one right
after the other, and the next round in the other order (A B, B A, ...), so that whatever the machine does in the meantime
happens to both; the two results carry the same `interleaved` mark and are compared round by round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.observe.run_dir import package_versions
from rhymemeg.perf.result import Measure, Result, machine, now
from rhymemeg.perf.suite import STEP, step_command, step_measures

STEP_SKIP = 2


class MeasurementError(RhymeMegError):
    """A process of a measurement failed or did not end. The message names the group."""


@dataclass(frozen=True)
class Settings:
    """How to measure. `timeout` in seconds, of one process; `steps`: trainer steps a round, for the group `step`."""

    groups: dict[str, list[str]]
    rounds: int = 5
    repeats: int = 9
    model: str = "launch/quickstart_model"
    steps: int = 12
    ranks: int = 2
    timeout: float = 900.0

    def comparable(self) -> dict[str, Any]:
        """What two results must share. The number of rounds and repeats is not part of it."""
        facts: dict[str, Any] = {"probes": sorted(p for probes in self.groups.values() for p in probes)}
        if set(self.groups) - {"quick"}:
            facts["model"] = Path(self.model).name
        if STEP in self.groups:
            facts |= {"ranks": self.ranks, "steps": self.steps}
        return facts


def own_tree() -> Path:
    """The source tree that this package runs from."""
    return Path(__file__).resolve().parents[2]


def check_tree(tree: Path) -> Path:
    """The resolved path of a source tree that has this tool."""
    path = tree.resolve()
    if not (path / "rhymemeg" / "perf" / "worker.py").is_file():
        raise ConfigError(f"--against {tree}: no source tree with rhymemeg/perf")
    return path


def run(settings: Settings, trees: Sequence[Path], say: Callable[[str], None] = lambda _: None) -> list[Result]:
    """A result for each tree (one or two), in their order."""
    rounds: list[dict[str, _Rounds]] = [{} for _ in trees]
    for number in range(settings.rounds):
        order = list(range(len(trees)))[:: 1 if number % 2 == 0 else -1]
        for group, probes in settings.groups.items():
            for at in order:
                where = f", {trees[at]}" if len(trees) > 1 else ""
                say(f"round {number + 1}/{settings.rounds}: {group}{where}")
                done = _step(settings, trees[at]) if group == STEP else _worker(settings, trees[at], group, probes)
                _add(rounds[at], done)
    mark = now() + f"-{os.getpid()}" if len(trees) > 1 else ""
    facts, versions = machine(), package_versions()
    return [
        Result(
            measures=[
                Measure(name, r.phase, r.seconds, r.speed, "s a token" if name.startswith("rollout.") else "s", r.clock)
                for name, r in measured.items()
            ],
            machine=facts,
            versions=versions,
            settings=settings.comparable(),
            made=now(),
            label=str(tree) if len(trees) > 1 else "",
            interleaved=mark,
        )
        for tree, measured in zip(trees, rounds)
    ]


@dataclass
class _Rounds:
    phase: str
    clock: str
    seconds: list[list[float]]
    speed: list[list[float]]


def _add(kept: dict[str, _Rounds], done: dict[str, Any]) -> None:
    for name, measured in done["measures"].items():
        into = kept.setdefault(name, _Rounds(measured["phase"], done["clock"], [], []))
        into.seconds.append(measured["seconds"])
        if measured["speed"]:
            into.speed.append(measured["speed"])


def _worker(settings: Settings, tree: Path, group: str, probes: Sequence[str]) -> dict[str, Any]:
    words = [
        "-m",
        "rhymemeg.perf.worker",
        "--repeats",
        str(settings.repeats),
        "--model",
        str(Path(settings.model).resolve()),
    ]
    output = _python([*words, "--probes", *probes], tree, group, settings.timeout)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise MeasurementError(f"the process of group {group!r} in {tree} ended without a result")
    return json.loads(lines[-1].removeprefix("RESULT "))


def _step(settings: Settings, tree: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rhymemeg-perf-") as folder:
        command = step_command(settings.ranks, settings.steps + STEP_SKIP, Path(folder))
        _python([*command, "--hf-checkpoint", str(Path(settings.model).resolve())], tree, STEP, settings.timeout)
        measured = step_measures(Path(folder), STEP_SKIP)
    return {
        "clock": "wall",
        "measures": {name: {"phase": p, "seconds": s, "speed": []} for name, (p, s) in measured.items()},
    }


def _python(words: Sequence[str], tree: Path, group: str, timeout: float) -> str:
    """Standard output of a Python process that imports this package from `tree`. The whole process group is ended when
    it takes too long."""
    inherited = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if k not in inherited}
    environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment |= {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"group {group!r} in {tree} did not end in {timeout:g} s (--timeout)") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        said = [line for line in (errors + output).splitlines() if line.strip()]
        last = next((line for line in reversed(said) if "rror" in line), said[-1] if said else "no output")
        raise MeasurementError(f"group {group!r} in {tree} failed with status {process.returncode}: {last.strip()}")
    return output
