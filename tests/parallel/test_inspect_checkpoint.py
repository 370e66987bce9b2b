"""The command that tells what a checkpoint holds. Its subjects are converted weights; those of runs have the same files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rhymemeg.parallel import convert
from rhymemeg.parallel.inspect_checkpoint import main
from tests.parallel import cases


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    cases.make_model("qwen3", folder / "model")
    convert.to_megatron(folder / "model", folder / "weights")
    return folder / "weights"


def test_a_whole_checkpoint(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(made), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in said and "tensors: model 10" in said and said.rstrip().endswith("whole")
    assert "decoder.layers.mlp.linear_fc1.weight  float32 [4, 192, 64] in 4 chunks" in said
    assert main([str(made.parent)]) == 0  # a folder of checkpoints


@pytest.mark.parametrize(
    ("damage", "text", "without_reading"),
    [
        ("flip", "__0_0.distcp is corrupt", False),
        ("cut", "__0_0.distcp has 1000 bytes", True),
        ("delete", "__0_0.distcp is missing", True),
        ("manifest", "manifest.json is not valid JSON", True),
        ("folder", "manifest.json cannot be read: Is a directory", True),
        ("table", ".metadata is corrupt", False),
        ("extra", "stray is not in the manifest", True),
    ],
)
def test_damage_is_named(
    damage: str, text: str, without_reading: bool, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made, tmp_path / "c")
    shard = folder / "__0_0.distcp"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 16
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:1000])
    elif damage == "delete":
        shard.unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text('{"files": {')
    elif damage == "folder":
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").mkdir()
    elif damage == "table":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-1] + b"?")
    else:
        (folder / "stray").write_text("")
    assert main([str(folder)]) == 1
    assert text in capsys.readouterr().out
    assert main([str(folder), "--no-verify"]) == (1 if without_reading or damage == "table" else 0)


def test_nothing_there(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "nowhere")]) == 2
