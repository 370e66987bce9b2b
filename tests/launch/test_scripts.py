"""The shell scripts: their refusals, and how the Slurm job ends. Slurm itself is replaced by two small scripts on PATH, the
ranks by a sleep: what is tested is the job script's own logic."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.torchrun import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    command = ["shellcheck", "-x", *[str(script.relative_to(ROOT)) for script in SCRIPTS]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout


def node(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RHYMEMEG_")} | variables
    command = [str(LAUNCH / "node.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ([], {}, "usage: launch/node.sh MODULE"),
        (["rhymemeg.train"], {"RHYMEMEG_NODES": "2"}, "RHYMEMEG_NODES=2 needs RHYMEMEG_HEAD"),
        (["x"], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "sleep mode cannot work with"),
    ],
)
def test_refusals(words: list[str], variables: dict[str, str], message: str) -> None:
    result = node(*words, **variables)
    assert result.returncode == 2 and message in result.stderr


class Job:
    """The job script in a folder of its own, with stand-ins for srun, scontrol and node.sh."""

    def __init__(self, folder: Path, node_script: str, **variables: str) -> None:
        self.folder = folder
        (folder / "launch").mkdir()
        (folder / "bin").mkdir()
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").write_text("")
        self._script(folder / "launch" / "node.sh", node_script)
        self._script(folder / "bin" / "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"')
        self._script(folder / "bin" / "scontrol", f'echo "$*" >> {folder}/scontrol.log; [ "$1" != show ] || echo node1')
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RHYMEMEG_", "SLURM_"))}
        environment |= {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "RHYMEMEG_CHECK": "0",
        }
        self.process = subprocess.Popen(
            [str(LAUNCH / "slurm.sbatch"), "--option", "value"],
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @staticmethod
    def _script(file: Path, text: str) -> None:
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=30)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, output

    @property
    def requeued(self) -> bool:
        return "requeue 1234" in (self.folder / "scontrol.log").read_text()


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_ends_with_the_status_of_its_run(status: int, tmp_path: Path) -> None:
    job = Job(tmp_path, f'echo "$RHYMEMEG_NODES $RHYMEMEG_HEAD $RHYMEMEG_PORT $*"; exit {status}')
    found, output = job.end()
    assert found == status and not job.requeued
    assert "2 node1 11234 rhymemeg.train --option value" in output


NODE = """trap 'echo saved > saved; exit 1' TERM
touch started
while true; do sleep 0.1; done"""


def test_a_job_that_is_told_to_stop_saves_and_queues_again(tmp_path: Path) -> None:
    job = Job(tmp_path, NODE)
    job.wait_for("started")
    job.process.send_signal(signal.SIGUSR1)
    status, output = job.end()
    assert status == 0 and job.requeued, output
    assert (tmp_path / "saved").exists()


def test_it_does_not_queue_for_ever(tmp_path: Path) -> None:
    job = Job(tmp_path, NODE, SLURM_RESTART_COUNT="3", RHYMEMEG_MAX_QUEUED="3")
    job.wait_for("started")
    job.process.send_signal(signal.SIGUSR1)
    status, output = job.end()
    assert status == 1 and not job.requeued and "RHYMEMEG_MAX_QUEUED allows no more" in output


def test_a_failed_check_stops_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, '[ "$1" != rhymemeg.doctor ] || exit 1\ntouch trained', RHYMEMEG_CHECK="1")
    status, output = job.end()
    assert status == 2 and "the check found errors" in output and not (tmp_path / "trained").exists()
