"""What happens when things break, measured on real runs of a tiny model on this machine's CPU.

    python tools/fault_matrix.py --output-dir runs/faults                    all rows (about 15 starts of the program)
    python tools/fault_matrix.py --rows kill:1:checkpoint,damaged,sigterm    some of them
    python tools/fault_matrix.py --list

Writes faults.md and faults.json there; exit status 1 if a row did not go as expected. How the rows share runs:

* **chain**: one `torchrun --max-restarts`, two ranks, a checkpoint every 2 of 4 steps, `--load auto`. Every attempt is broken
  in step 3 by one row (kill -9 of a rank in a phase, a disk that fills up, a rank that stops answering); torchrun starts the
  next. The last attempt has a rank that is slow and a clock that jumps, and ends.
* **exact**: rewards, losses and gradient norms of the chain must equal those of a run that nothing happens to.
* **damaged and sigterm**: a copy of the chain's directory with three newer checkpoints (cut short, a flipped bit, a missing
  shard), which a run must pass over; torchrun then gets SIGTERM.
* **read-only**: a run directory that cannot be written.

The ranks run this file, too: it puts the faults into `rhymemeg.train` from outside, by the names of its phases.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAULT_STEP, STEPS, INTERVAL = 3, 4, 2
TIMEOUT_MINUTES = 1.5
LIMIT = (
    240.0  # seconds from any fault until all ranks have ended: the time-out, how often it is looked at, torchrun's 30 s
)
PHASES = ("rollout", "reward", "train", "sync", "checkpoint")
KILLS = tuple(f"kill:{rank}:{phase}" for phase in PHASES for rank in (0, 1))
BREAKING = (*KILLS, "full-disk", "stopped")  # each ends an attempt of the chain
ROWS = (*BREAKING, "slow", "clock", "exact", "damaged", "sigterm", "read-only")
MARK = "RHYMEMEG_FAULT_RUN"
SAME = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/lr", "rollout/tokens")

OPTIONS = (
    "--config", "launch/configs/quickstart.yaml", "--display", "lines", "--tensorboard", "False", "--export-hf", "False",
    "--train-iters", str(STEPS), "--save-interval", str(INTERVAL), "--rollout-batch-size", "4",
    "--n-samples-per-prompt", "4", "--max-response-len", "64", "--num-prompts", "8", "--eval-interval", "0",
)  # fmt: skip


@dataclass
class Row:
    """One line of the table. `steps_lost`: steps that had ended and were done again; `seconds`: from the fault until all
    ranks had ended."""

    name: str
    expected: str
    observed: str
    ok: bool
    steps_lost: int | None = None
    seconds: float | None = None
    orphans: int = 0


# ----------------------------------------------------------------------------------------------------------- in a rank


def as_rank(plan_file: Path, argv: list[str]) -> int:
    """`rhymemeg.train` with what the plan has for this attempt."""
    plan = json.loads(plan_file.read_text())
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    faults = plan[attempt] if attempt < len(plan) else []

    def tell(event: str, **facts: Any) -> None:
        line = {"attempt": attempt, "rank": rank, "pid": os.getpid(), "event": event, "time": time.monotonic()} | facts
        with plan_file.with_suffix(".events").open("a") as file:
            file.write(json.dumps(line) + "\n")

    tell("start")
    from rhymemeg import train
    from rhymemeg.parallel import failure

    begin_step, phase = failure.begin_step, failure.phase
    step = -1

    def on_step(number: int | None) -> None:
        nonlocal step
        begin_step(number)
        step = -1 if number is None else number
        tell("step", step=number)
        if "clock" in faults and number is not None:
            shift, clock = (86400.0 if number == FAULT_STEP - 1 else 0.0), time.time_ns
            time.time = lambda: clock() / 1e9 + shift
            tell("fault", step=number, name="clock")

    def on_phase(name: str) -> None:
        phase(name)
        if step != FAULT_STEP:
            return
        for fault in faults:
            kind, _, rest = fault.partition(":")
            if kind == "kill" and rest == f"{rank}:{name}":
                _kill(name, rank, lambda: tell("fault", step=step, name=fault))  # noqa: B023
            elif kind == "full-disk" and name == "checkpoint" and rank == 1:
                tell("fault", step=step, name=fault)
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write then fails with EFBIG
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            elif kind == "stopped" and name == "rollout" and rank == 1:
                tell("fault", step=step, name=fault)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif kind == "slow" and name == "train" and rank == 1:
                tell("fault", step=step, name=fault)
                time.sleep(25)

    patched: Any = failure
    patched.begin_step, patched.phase = on_step, on_phase
    return train.main(argv)


def _kill(phase: str, rank: int, tell: Callable[[], None]) -> None:
    """SIGKILL to this process: at once in phases that last an instant, in the middle of the others."""

    def strike() -> None:
        tell()
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_and_strike() -> None:
        folder, deadline = Path(os.environ["FAULT_CHECKPOINTS"]), time.monotonic() + 10
        while phase == "checkpoint" and time.monotonic() < deadline and not any(folder.glob(f".*.saving/__{rank}_*")):
            time.sleep(0.001)
        if phase != "checkpoint":
            time.sleep(0.05)
        strike()

    if phase in ("reward", "sync"):
        strike()
    threading.Thread(target=wait_and_strike, daemon=True).start()


# ---------------------------------------------------------------------------------------------------------- from outside


class Launch:
    """One torchrun with a plan of faults. `mark` is in the environment of everything it starts."""

    def __init__(self, folder: Path, plan: list[list[str]], words: Sequence[str] = ()) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.plan = folder.with_suffix(".plan")
        self.plan.parent.mkdir(parents=True, exist_ok=True)
        self.plan.write_text(json.dumps(plan))
        self.plan.with_suffix(".events").unlink(missing_ok=True)
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        environment = clean | {MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "FAULT_CHECKPOINTS": str(folder / "checkpoints")}
        environment |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(len(plan) - 1), str(Path(__file__).resolve()), "--as-rank", str(self.plan)]
        command += [*OPTIONS, "--output-dir", str(folder), *words]
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, timeout: float) -> int | None:
        """The exit status; None if it had to be killed."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return None

    def events(self) -> list[dict[str, Any]]:
        file = self.plan.with_suffix(".events")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def orphans(self) -> int:
        """Processes that it has left behind, a moment after its end. They are killed."""
        time.sleep(1)
        left = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    left.append(int(folder.name))
            except OSError:
                continue
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)


def steps_of(folder: Path) -> dict[int, list[Any]]:
    """What must be the same of each step of a run, from its metrics.jsonl."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: [row.get(name) for name in SAME] for row in rows if "reward/mean" in row}


def chain(work: Path, rows: Sequence[str]) -> list[Row]:
    """The rows of the chain, and whether its end equals the reference."""
    breaking = [row for row in rows if row in BREAKING]
    last = [row for row in rows if row in ("slow", "clock")]
    plan = [*([fault] for fault in breaking), last]
    words = [
        "--load",
        "auto",
        "--distributed-timeout-minutes",
        str(TIMEOUT_MINUTES),
        "--step-budget-minutes",
        str(15 / 60),
    ]
    launch = Launch(work / "chain", plan, words)
    status = launch.finish(120 + 100 * len(plan) + (150 if "stopped" in breaking else 0))
    orphans, events, output = launch.orphans(), launch.events(), launch.output()
    found = []
    for attempt, name in enumerate(breaking):
        fault = next((e for e in events if e["attempt"] == attempt and e["event"] == "fault"), None)
        after = [e for e in events if e["attempt"] == attempt + 1]
        begun = next((e["step"] for e in after if e["event"] == "step"), None)
        if fault is None or begun is None:
            found.append(Row(name, "the run goes on", "the fault was not reached, or nothing came after it", False))
            continue
        # A fault while the checkpoint of a step is written comes after that step has ended.
        ended = fault["step"] + (name == "full-disk" or name.endswith(":checkpoint"))
        seconds = min(e["time"] for e in after if e["event"] == "start") - fault["time"]
        row = Row(name, "", "", False, ended - begun, round(seconds, 1), orphans)
        if name.startswith("kill"):
            _, rank, phase = name.split(":")
            row.expected = f"rank {rank} and the phase are named, torchrun restarts, step {INTERVAL} is next"
            message = rf"rhymemeg: error: rank {rank} \(pid {fault['pid']} on \S+\) has died .* in phase '{phase}'"
            named = re.search(message, output) is not None
        elif name == "full-disk":
            row.expected = f"the write is named, older checkpoints stay, torchrun restarts, step {INTERVAL} is next"
            named = "File too large" in output or "could not be written in full" in output
        else:
            row.expected = f"a warning, then a time-out, both name it; torchrun restarts, step {INTERVAL} is next"
            named = "nothing is heard of rank 1" in output and "no word from engine(s) 1" in output
        row.observed = f"{'named' if named else 'NOT named'}; next attempt begins with step {begun}"
        row.ok = named and begun == INTERVAL and row.steps_lost == ended - INTERVAL and seconds < LIMIT and not orphans
        found.append(row)
    for name in last:
        fault = next((e for e in events if e["event"] == "fault" and e["name"] == name), None)
        row = Row(name, "", "", False, 0, None, orphans)
        if name == "slow":
            stacks = sorted(p.name for p in (work / "chain/stacks").glob(f"step_{FAULT_STEP}_*"))
            row.expected = "the run goes on; stacks of all ranks once"
            row.observed = f"exit status {status}; {len(stacks)} files of stacks"
            row.ok = status == 0 and len(stacks) >= 2
        else:
            row.expected, row.observed = "nothing", f"exit status {status}"
            row.ok = status == 0
        row.ok = row.ok and fault is not None
        found.append(row)
    if "exact" not in rows:
        return found
    reference = Launch(work / "reference", [[]])
    plain = reference.finish(240)
    same = status == 0 and plain == 0 and steps_of(work / "chain") == steps_of(work / "reference")
    observed = f"exit statuses {status} and {plain}; steps {'equal' if same else 'NOT equal'}"
    expected = "the chain ends as a run without faults, each step bit for bit"
    found.append(Row("exact", expected, observed, same, None, None, reference.orphans()))
    return found


def damage(work: Path, base: Path) -> Path:
    """A copy of a run with three newer checkpoints that are not whole."""
    folder = work / "damaged"
    whole = base / f"checkpoints/step_{INTERVAL:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    for steps in (INTERVAL, 10, 11, 12):
        shutil.copytree(whole, folder / f"checkpoints/step_{steps:08d}")
    newest, middle, oldest = (folder / f"checkpoints/step_{steps:08d}" for steps in (12, 11, 10))
    os.truncate(newest / "__1_0.distcp", 1000)
    data = bytearray((middle / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (middle / "__0_0.distcp").write_bytes(data)
    (oldest / "__1_0.distcp").unlink()
    return folder


def damaged_and_sigterm(work: Path, base: Path, rows: Sequence[str]) -> list[Row]:
    """Both in one run."""
    folder = damage(work, base)
    launch = Launch(folder, [[]], ["--load", "auto", "--train-iters", "500", "--keep-last", "9"])
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and launch.process.poll() is None:
        if any(e["event"] == "step" and e["step"] == FAULT_STEP for e in launch.events()):
            break
        time.sleep(0.1)
    asked = time.monotonic()
    if launch.process.poll() is None:
        launch.process.send_signal(signal.SIGTERM)
    status = launch.finish(90)
    seconds, orphans, output = round(time.monotonic() - asked, 1), launch.orphans(), launch.output()
    found = []
    if "damaged" in rows:
        texts = {
            "cut short": "__1_0.distcp has 1000 bytes",
            "flipped bit": "__0_0.distcp is corrupt",
            "missing shard": "__1_0.distcp is missing",
        }
        resumed = f"step_{INTERVAL:08d}: step {INTERVAL} of" in output
        for name, text in texts.items():
            observed = f"{'named' if text in output else 'NOT named'}; {'resumed' if resumed else 'NOT resumed'}"
            expected = "the file is named; an older checkpoint is taken"
            found.append(Row(name, expected, observed, text in output and resumed, None, None, orphans))
    if "sigterm" in rows:
        done = len(steps_of(folder)) + INTERVAL
        saved = (folder / f"checkpoints/step_{done:08d}").is_dir()
        summary = folder / "summary.json"
        says = json.loads(summary.read_text())["status"] if summary.exists() else None
        expected = "the step ends and is saved; summary.json says preempted; torchrun's status is not 0"
        observed = f"{done} steps done, {'saved' if saved else 'NOT saved'}; {says}; status {status}"
        ok = saved and says == "preempted" and status not in (0, None) and not orphans
        found.append(Row("sigterm", expected, observed, ok, 0 if saved else None, seconds, orphans))
    return found


def read_only(work: Path) -> Row:
    """A directory without permission to write; for root, to whom that means nothing, one of the kernel's."""
    folder = Path("/proc/rhymemeg")
    if os.geteuid() != 0:
        folder = work / "read-only"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o555)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "rhymemeg.train", *OPTIONS, "--output-dir", str(folder)]
    command += ["--tensor-model-parallel-size", "1"]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=120, check=False)
    named = f"--output-dir: cannot write to {folder}" in done.stderr
    observed = f"{'named' if named else 'NOT named'}; status {done.returncode}"
    return Row(
        "read-only",
        "the option is named before anything is started; status 2",
        observed,
        named and done.returncode == 2,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = ["| fault | expected | observed | steps lost | seconds | orphans | |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = [r.name, r.expected, r.observed, r.steps_lost, r.seconds, r.orphans, "ok" if r.ok else "WRONG"]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--as-rank"]:
        return as_rank(Path(words[1]), words[2:])
    parser = argparse.ArgumentParser(description="What happens when things break, measured on real runs.")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs/faults", help="where the runs and the table go")
    parser.add_argument("--rows", default="all", help="names from --list, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    options = parser.parse_args(words)
    if options.list:
        print("\n".join(ROWS))
        return 0
    rows = list(ROWS) if options.rows == "all" else options.rows.split(",")
    unknown = sorted(set(rows) - set(ROWS))
    if unknown:
        parser.error(f"unknown row {unknown[0]} (see --list)")
    work: Path = options.output_dir.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found: list[Row] = []
    later = [row for row in rows if row in ("damaged", "sigterm")]
    if later or any(row in (*BREAKING, "slow", "clock", "exact") for row in rows):
        found += chain(work, rows)
    if later:
        found += damaged_and_sigterm(work, work / "chain", rows)
    if "read-only" in rows:
        found.append(read_only(work))
    (work / "faults.json").write_text(json.dumps([asdict(row) for row in found], indent=1))
    (work / "faults.md").write_text(markdown(found))
    print(markdown(found))
    return int(not all(row.ok for row in found))


if __name__ == "__main__":
    sys.exit(main())
