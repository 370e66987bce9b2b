"""An export that the disk has no room for leaves what was there, and nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.launch import environment
from tests.torchrun import ROOT
from tests.weight_sync.models import write_checkpoint

pytestmark = pytest.mark.distributed


def test_full_disk(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", "Qwen3ForCausalLM", hidden_size=64, intermediate_size=128)
    (tmp_path / "scratch").mkdir()
    program = str(Path(__file__).with_name("full_disk_program.py"))
    command = [sys.executable, program, str(tmp_path / "source"), str(tmp_path / "scratch")]
    result = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    *cases, last = [json.loads(line[5:]) for line in result.stdout.splitlines() if line.startswith("CASE ")]
    assert len(cases) == 6
    for case in cases:
        folder = "out/hf" if case["older"] else "new/hf"
        assert "cannot write" in case["message"] and folder in case["message"], case
        assert case["same"], case
    assert last["files"] > 2 and not last["same"]
    assert not list((tmp_path / "scratch").rglob(".*")), "nothing stays beside the folders"
