"""Folders that cannot be read: one error that names tensor and file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rhymemeg.errors import CheckpointError
from rhymemeg.weight_sync.hf_files import HfFolder, copy_companions, write_index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and an index."""
    save_file({"a": torch.arange(12.0).view(3, 4)}, tmp_path / "one.safetensors")
    save_file({"b": torch.arange(5.0)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, 68)
    return tmp_path


def test_boxes_of_a_tensor(folder: Path) -> None:
    with HfFolder(folder) as files:
        files.require(["a", "b"])
        left, right = files.read("a", (3, 4), [((1, 3), (0, 2)), ((0, 1), (3, 4))])
    assert left.tolist() == [[4, 5], [8, 9]] and right.tolist() == [[3]]


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert HfFolder(tmp_path).file_of == {"a": "model.safetensors"}


def test_missing_tensor(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks tensor 'c' and 1 more"):
        HfFolder(folder).require(["a", "c", "d"])


def test_wrong_shape(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one\.safetensors: tensor 'a' has shape \(3, 4\), expected \(4, 4\)"):
        HfFolder(folder).read("a", (4, 4), [])


def test_truncated_file(folder: Path) -> None:
    file = folder / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"one\.safetensors is truncated"):
        HfFolder(folder).read("a", (3, 4), [((0, 1), (0, 1))])


def test_file_that_the_index_names_is_missing(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing"):
        HfFolder(folder).read("b", (5,), [])


def test_tensor_that_the_index_names_is_missing(folder: Path) -> None:
    write_index(folder, {"a": "two.safetensors"}, 0)
    with pytest.raises(CheckpointError, match=r"two\.safetensors lacks tensor 'a'"):
        HfFolder(folder).read("a", (3, 4), [])


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_broken_index(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="not a valid index"):
        HfFolder(folder)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights"):
        HfFolder(tmp_path)


def test_companions_get_the_new_dtype(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text('{"dtype": "float32", "x": 1}')
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "model.safetensors").write_text("")
    copy_companions(source, target, torch.bfloat16)
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "tokenizer.json"]
    assert json.loads((target / "config.json").read_text()) == {"dtype": "bfloat16", "x": 1}
