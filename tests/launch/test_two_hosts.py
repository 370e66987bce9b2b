"""Two torchrun agents of two ranks each, as two hosts would start them with launch/node.sh: a run trains, one agent is
lost with its ranks, comes back, and the run goes on from its newest checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.torchrun import ROOT

STEPS = 8
OPTIONS = (
    "rhymemeg.train", "--config", "launch/configs/quickstart.yaml", "--display", "lines", "--load", "auto",
    "--train-iters", str(STEPS), "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-response-len", "48",
    "--num-prompts", "8", "--eval-interval", "0", "--save-interval", "1", "--tensorboard", "False",
    "--vllm-kv-cache-memory-gib", "0.1", "--export-hf", "False",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Host:
    """One agent and its ranks."""

    def __init__(self, log: Path, output: Path, port: int, is_head: bool) -> None:
        self.log = log
        environment = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        }
        environment |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RHYMEMEG_NODES": "2",
            "RHYMEMEG_RANKS": "2",
            "RHYMEMEG_HEAD": "127.0.0.1",
            "RHYMEMEG_ADDRESS": "127.0.0.1",
            "RHYMEMEG_IS_HEAD": str(int(is_head)),
            "RHYMEMEG_PORT": str(port),
            "RHYMEMEG_RESTARTS": "2",
            "RHYMEMEG_GRACE": "30",
        }
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                ["launch/node.sh", *OPTIONS, "--output-dir", str(output)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """As if the host had lost power."""
        if self.process.poll() is not None:
            return
        agent = psutil.Process(self.process.pid)
        for process in (*agent.children(recursive=True), agent):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def steps(output: Path) -> list[int]:
    file = output / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["step"] for row in rows if "reward/mean" in row]


@pytest.mark.engine
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_host_is_lost_and_comes_back(tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "run"
    first = Host(tmp_path / "first.log", output, port, True)
    second = Host(tmp_path / "second.log", output, port, False)
    hosts = [first, second]

    try:
        deadline = time.monotonic() + 400
        while len(steps(output)) < 2:
            assert time.monotonic() < deadline, first.log.read_text()[-4000:] + second.log.read_text()[-4000:]
            assert first.process.poll() is None and second.process.poll() is None, first.log.read_text()[-4000:]
            time.sleep(0.3)
        second.kill()
        before = len(steps(output))
        third = Host(tmp_path / "third.log", output, port, False)
        hosts.append(third)
        for host in (first, third):
            assert host.process.wait(400) == 0, host.log.read_text()[-6000:]
    finally:
        for host in hosts:
            host.kill()
    assert before < STEPS
    assert sorted(set(steps(output))) == list(range(STEPS))
    assert "resum" in first.log.read_text()
    summary = json.loads((output / "summary.json").read_text())
    assert summary["status"] == "completed"
