"""What was measured: values with the machine and the versions that they belong to, in a JSON file.

    {"schema": "rhymemeg.perf/1", "made": "2026-01-31T12:00:00+00:00", "label": "", "machine": {...}, "versions": {...},
     "settings": {...}, "interleaved": "", "measures": [{"name": "drafter.append", "phase": "drafter", "unit": "s",
     "clock": "cpu", "rounds": [[...], ...], "reference_rounds": [[...], ...]}, ...]}

`reference_rounds` are times of a fixed piece of work that ran between the repeats: the speed of the machine at that
moment. `interleaved` is the same in two results whose rounds were measured in turns. A *history* is a folder of such files,
one a result; those of one machine and the same settings belong together. Reading never runs anything from a file.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rhymemeg.errors import DataError
from rhymemeg.observe.files import write_atomically

SCHEMA = "rhymemeg.perf/1"


@dataclass(frozen=True)
class Measure:
    """Repeats of one piece of work, in seconds, by round. `clock`: cpu (of the process) or wall."""

    name: str
    phase: str
    rounds: list[list[float]]
    reference_rounds: list[list[float]] = field(default_factory=list)
    unit: str = "s"
    clock: str = "cpu"


@dataclass(frozen=True)
class Result:
    """See the module."""

    measures: list[Measure]
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    made: str = ""
    label: str = ""
    interleaved: str = ""
    source: str = ""
    """The file it was read from; not written."""

    @property
    def kind(self) -> str:
        """What results must share to be one history: machine and settings."""
        return fingerprint(self.machine) + "-" + _digest(self.settings)

    def to_json(self) -> str:
        entry = {"schema": SCHEMA, **asdict(self)}
        del entry["source"]
        return json.dumps(entry, indent=1) + "\n"


def machine() -> dict[str, Any]:
    """What the speed of this machine depends on, as far as it can be read without privileges."""
    facts: dict[str, Any] = {"system": platform.system(), "kernel": platform.release(), "arch": platform.machine()}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                facts["cpu"] = line.partition(":")[2].strip()
                break
        memory = Path("/proc/meminfo").read_text(encoding="utf-8").split(None, 2)[1]
        facts["memory_gib"] = round(int(memory) / (1 << 20))
    except (OSError, ValueError, IndexError):
        pass
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["gpus"] = _gpus()
    facts["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS", "")
    return facts


def _gpus() -> list[str]:
    """Name and driver of each GPU, by NVML; empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, or no driver
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
        return [f"{name} (driver {driver})" for name in names]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


# The kernel's and the driver's versions are kept with a result but may change within a history: that they made it slower
# is one of the things to find out.
IDENTITY = ("system", "arch", "cpu", "cores", "memory_gib", "omp_num_threads")


def fingerprint(facts: dict[str, Any]) -> str:
    """Short name of a kind of machine."""
    gpus = [str(name).partition(" (driver")[0] for name in facts.get("gpus") or []]
    return _digest({name: facts.get(name) for name in IDENTITY} | {"gpus": gpus})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def now() -> str:
    """The time in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_result(file: str | Path) -> Result:
    """Raises DataError naming the file and what is wrong with it."""
    path = Path(file)
    try:
        entry = json.loads(path.read_text(encoding="utf-8"), parse_constant=_not_a_number)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a result of rhymemeg perf: {error}") from None
    if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
        found = entry.get("schema") if isinstance(entry, dict) else None
        raise DataError(f"{path}: not a result of rhymemeg perf (schema {found!r}, expected {SCHEMA!r})")
    try:
        measures = [
            Measure(
                str(m["name"]),
                str(m["phase"]),
                _rounds(m["rounds"], path, m["name"]),
                _rounds(m.get("reference_rounds", []), path, m["name"], may_be_empty=True),
                str(m.get("unit", "s")),
                str(m.get("clock", "cpu")),
            )
            for m in entry["measures"]
        ]
        if not isinstance(entry["machine"].get("gpus", []), list):
            raise TypeError("gpus of the machine are not a list")
        return Result(
            measures,
            dict(entry["machine"]),
            dict(entry["versions"]),
            dict(entry.get("settings", {})),
            str(entry.get("made", "")),
            str(entry.get("label", "")),
            str(entry.get("interleaved", "")),
            str(path),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a result of rhymemeg perf: {error!r}") from None


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a time")


def _rounds(value: Any, path: Path, name: Any, may_be_empty: bool = False) -> list[list[float]]:
    if not value and may_be_empty:
        return []
    rounds = [[float(seconds) for seconds in repeats] for repeats in value]
    if not rounds or not all(rounds) or not all(math.isfinite(s) and s > 0 for r in rounds for s in r):
        raise DataError(f"{path}: measure {name!r} has a round without times, or one that is not a positive number")
    return rounds


def write_result(file: str | Path, result: Result) -> None:
    """Whole or not at all; the folder is made."""
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, result.to_json())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


def record(folder: str | Path, result: Result) -> Path:
    """Add a result to a history. Returns its file."""
    stamp = re.sub(r"[^0-9A-Za-z-]", "", (result.made or now()).replace("+00:00", "Z"))[:32]  # a name, never a path
    path = Path(folder) / f"{result.kind}_{stamp}_{_digest(result.to_json())[:6]}.json"
    write_result(path, result)
    return path


def read_history(folder: str | Path, like: Result) -> list[Result]:
    """Results of the same machine and settings as `like`, oldest first. DataError if there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"--history {path}: no such folder")
    found = [read_result(file) for file in sorted(path.glob("*.json"))]
    same = [result for result in found if result.kind == like.kind and result.made != like.made]
    if not same:
        others = len({result.kind for result in found})
        raise DataError(
            f"--history {path}: no result of this machine and these settings ({like.kind}) among {len(found)} of "
            f"{others} other kinds"
        )
    return sorted(same, key=lambda result: result.made)


def merge_versions(results: Iterable[Result]) -> dict[str, set[str]]:
    """Every version of each package that appears."""
    merged: dict[str, set[str]] = {}
    for result in results:
        for name, version in result.versions.items():
            merged.setdefault(name, set()).add(version)
    return merged
