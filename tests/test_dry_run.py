"""`--dry-run`: the shipped configurations fit the GPUs that their first line names; what does not fit is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rhymemeg.config import Config
from rhymemeg.train import main
from tests.planning.models import FOLDERS, ROOT, write

CONFIGS = ROOT / "launch" / "configs"
COMMAND = re.compile(
    r"--dry-run --gpu-type (\S+) --num-gpus (\d+) \\\n#\s+--config launch/configs/(\S+) --hf-checkpoint launch/models/(\S+)"
)
RECIPES = sorted(file.name for file in CONFIGS.glob("*.yaml") if COMMAND.search(file.read_text()))


def plan(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["--dry-run", "--json-plan", *words]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As written in the file itself."""
    found = COMMAND.search((CONFIGS / name).read_text())
    assert found is not None and found[3] == name
    words = ["--gpu-type", found[1], "--num-gpus", found[2], "--config", str(CONFIGS / name)]
    result = plan(capsys, *words, "--hf-checkpoint", str(FOLDERS / found[4]))
    assert result["fits"] and result["ranks"] == int(found[2])
    # No engine that can only run a handful, no layout that waits more than it works.
    assert result["memory"]["requests_at_once"] >= 32
    assert result["training"]["bubble"] < 0.1 and result["training"]["stage_imbalance"] < 1.2
    assert Config.load_yaml(CONFIGS / name).model.hf_checkpoint == f"models/{found[4]}"
    assert any("tokenizer" in text for text in result["unchecked"])


def test_there_is_a_recipe_for_each_model() -> None:
    named = {COMMAND.search((CONFIGS / name).read_text())[4] for name in RECIPES}  # type: ignore[index]
    assert named == {folder.name for folder in FOLDERS.iterdir()}


def test_what_does_not_fit_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hf-checkpoint", str(FOLDERS / "Qwen3-32B"), "--prompt-data", "none", "--num-gpus", "8"]
    result = plan(capsys, "--gpu-type", "a100", *words, status=1)
    assert not result["fits"] and result["problems"] and result["advice"]["options"]


def test_the_page_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(CONFIGS / "qwen3_8b.yaml"), "--hf-checkpoint", str(FOLDERS / "Qwen3-8B")]
    assert main(["--dry-run", "--gpu-type", "h100", "--num-gpus", "16", *words]) == 0
    page = capsys.readouterr().out
    for part in ("parameters", "gradients", "optimizer state", "activations", "engine weights", "KV cache", "sync"):
        assert part in page
    for part in ("host: history", "by phase", "rollout", "train", "seconds a step", "imbalance", "not checked here"):
        assert part in page


def test_on_this_machine_sizes_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU type: the ranks that torchrun started, all files checked, no times."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = plan(capsys, "--config", "launch/configs/quickstart.yaml", "--device", "cpu")
    assert result["ranks"] == 2 and result["unchecked"] == [] and result["seconds"] == {}
    assert result["memory"]["parts"]["kv_cache"] == 256 << 20 and result["memory"]["budget"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "--gpu-type", "h101"], "--gpu-type: 'h101' is not known"),
        (["--gpu-type", "h100"], "add --dry-run"),
        (["--dry-run", "--gpu-type", "h100", "--num-gpus", "6"], "does not divide"),
        (["--dry-run", "--gpu-type", "h100", "--num-gpus", "8", "--mean-response-len", "20000"], "--mean-response-len"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--config", str(CONFIGS / "qwen3_8b.yaml"), "--hf-checkpoint", str(FOLDERS / "Qwen3-8B")]
    model += ["--tensor-model-parallel-size", "4"]
    assert main([*words, *model]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kl-coef", "0.1", "--ref-hf-checkpoint", "/nowhere"], "--ref-hf-checkpoint: model folder '/nowhere'"),
        (
            ["--kl-coef", "0.1", "--ref-hf-checkpoint", "launch/models/Qwen3-8B"],
            "--ref-hf-checkpoint: num_layers of launch/models/Qwen3-8B is 36",
        ),
        (["--histospec", "--histospec-warm-start", "/nowhere"], "--histospec-warm-start: /nowhere is not a file"),
        (["--load", "/nowhere"], "--load: /nowhere does not exist"),
    ],
)
def test_files_a_run_would_read(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = ["--dry-run", "--config", "launch/configs/quickstart.yaml", "--device", "cpu", "--num-gpus", "2"]
    assert main([*run, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--gpu-type", "h100", "--num-gpus", "8", "--prompt-data", "x", "--hf-checkpoint"]
    assert main([*words, str(write(tmp_path / "mamba", {"architectures": ["MambaForCausalLM"]}))]) == 2
    assert "architecture 'MambaForCausalLM' is not supported" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
