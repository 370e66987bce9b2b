"""Rounds of measurements, each group of probes in a process of its own, all children of this one.

In a round the probes of a group take turns, repeat after repeat. With two source trees (`against`) the round has a process of
each, and they take turns too: each repeat is done by both, one right after the other, in the other order at the next repeat
(A B, B A, ...), so that whatever the machine does in the meantime happens to both. The two results carry the same
`interleaved` mark and are compared pair by pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.observe.run_dir import package_versions
from rhymemeg.perf.result import Measure, Result, machine, now
from rhymemeg.perf.runs import UNITS
from rhymemeg.perf.suite import STEP, step_command, step_measures

STEP_SKIP = 2
WARM_UP = 2
"""Repeats of a process that are not kept."""


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
    kept: list[dict[str, _Rounds]] = [{} for _ in trees]
    for number in range(settings.rounds):
        for group, probes in settings.groups.items():
            say(f"round {number + 1}/{settings.rounds}: {group}")
            if group == STEP:
                for at in list(range(len(trees)))[:: 1 if number % 2 == 0 else -1]:
                    _add(kept[at], _step(settings, trees[at]))
            else:
                for at, done in enumerate(_round(settings, trees, group, probes)):
                    _add(kept[at], done)
    mark = f"{now()} {os.getpid()}" if len(trees) > 1 else ""
    facts, versions = machine(), package_versions()
    return [
        Result(
            measures=[
                Measure(name, r.phase, r.seconds, r.speed, _unit(name, r.phase), r.clock)
                for name, r in measured.items()
            ],
            machine=facts,
            versions=versions,
            settings=settings.comparable(),
            made=now(),
            label=str(tree) if len(trees) > 1 else "",
            interleaved=mark,
        )
        for tree, measured in zip(trees, kept)
    ]


def _unit(name: str, phase: str) -> str:
    if name.startswith("step."):
        return f"s a {UNITS.get(phase, 'step')}"
    return "s a token" if name.startswith("rollout.") else "s"


@dataclass
class _Rounds:
    phase: str
    clock: str
    seconds: list[list[float]]
    speed: list[list[float]]


def _add(kept: dict[str, _Rounds], done: dict[str, _Rounds]) -> None:
    for name, measured in done.items():
        into = kept.setdefault(name, _Rounds(measured.phase, measured.clock, [], []))
        into.seconds += measured.seconds
        into.speed += measured.speed


def _round(settings: Settings, trees: Sequence[Path], group: str, probes: Sequence[str]) -> list[dict[str, _Rounds]]:
    """One round of one group: what each tree's process measured."""
    found: list[dict[str, _Rounds]] = [{} for _ in trees]
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(settings, tree, group, probes)) for tree in trees]
        for worker, measured in zip(workers, found):
            ready = worker.answer("READY")
            for name, phase in ready["phases"].items():
                measured[name] = _Rounds(phase, ready["clock"], [[]], [[]])
        for repeat in range(WARM_UP + settings.repeats):
            turn = repeat % len(probes)
            for probe in [*probes[turn:], *probes[:turn]]:
                for at in list(range(len(trees)))[:: 1 if repeat % 2 == 0 else -1]:
                    workers[at].order(probe)
                    done = workers[at].answer("DONE")
                    if repeat >= WARM_UP:
                        for name, seconds in done["seconds"].items():
                            found[at][name].seconds[0].append(seconds)
                            found[at][name].speed[0].append(done["speed"])
    return found


class _Worker:
    """A process of `rhymemeg.perf.worker` that imports this package from `tree`; ended when the block is left."""

    def __init__(self, settings: Settings, tree: Path, group: str, probes: Sequence[str]) -> None:
        self.name, self.timeout = f"group {group!r} in {tree}", settings.timeout
        words = ["-m", "rhymemeg.perf.worker", "--model", str(Path(settings.model).resolve()), "--probes", *probes]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed when the block is left
        self.process = _start(words, tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.buffer = b""

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)  # an engine that shuts down
        except subprocess.TimeoutExpired:
            _kill(self.process)
        self.process.stdout.close()
        self.errors.close()

    def order(self, probe: str) -> None:
        """Run a probe once."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(probe.encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self._failed() from None

    def answer(self, word: str) -> dict[str, Any]:
        """What the next line says, which begins with `word`."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                _kill(self.process)
                raise MeasurementError(f"{self.name} did not answer in {self.timeout:g} s (--timeout)")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._failed()
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        said, _, content = line.decode().partition(" ")
        if said != word:
            raise MeasurementError(f"{self.name} answered {line[:80]!r} where {word} was expected")
        return json.loads(content)

    def _failed(self) -> MeasurementError:
        status = self.process.wait()
        self.errors.seek(0)
        return MeasurementError(f"{self.name} failed with status {status}: {_last_error(self.errors.read().decode())}")


def _step(settings: Settings, tree: Path) -> dict[str, _Rounds]:
    """Whole steps of the trainer."""
    with tempfile.TemporaryDirectory(prefix="rhymemeg-perf-") as folder:
        command = step_command(settings.ranks, settings.steps + STEP_SKIP, Path(folder))
        command += ["--hf-checkpoint", str(Path(settings.model).resolve())]
        process = _start(command, tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=settings.timeout)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"steps in {tree} did not end in {settings.timeout:g} s (--timeout)") from None
        finally:
            _kill(process)
        if process.returncode:
            said = _last_error(output.decode())
            raise MeasurementError(f"steps in {tree} failed with status {process.returncode}: {said}")
        measured = step_measures(Path(folder), STEP_SKIP)
    return {name: _Rounds(phase, "wall", [seconds], []) for name, (phase, seconds) in measured.items()}


def _start(words: Sequence[str], tree: Path, **streams: Any) -> subprocess.Popen[bytes]:
    """A Python process that imports this package from `tree`, in a process group of its own."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment |= {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, *words], cwd=tree, env=environment, start_new_session=True, **streams)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_error(text: str) -> str:
    """The last line that names an error, or the last line."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(said) if "rror" in line), said[-1] if said else "no output")
