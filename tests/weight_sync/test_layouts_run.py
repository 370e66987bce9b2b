"""Load, export and push on 4 ranks, in many layouts of the actor and the engines, bundled in one launch."""

import json
from pathlib import Path

import pytest

from tests.torchrun import torchrun
from tests.weight_sync.layouts_program import CASES
from tests.weight_sync.models import write_checkpoint

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def outcomes(scratch: Path) -> list[dict]:
    folder = scratch / "models"
    write_checkpoint(folder / "qwen3_tied", "Qwen3ForCausalLM", tie_word_embeddings=True)
    write_checkpoint(folder / "qwen2", "Qwen2ForCausalLM")
    write_checkpoint(folder / "llama", "LlamaForCausalLM", num_key_value_heads=4)
    write_checkpoint(folder / "qwen3_moe", "Qwen3MoeForCausalLM", mlp_only_layers=[1])
    out = torchrun(
        4,
        "tests/weight_sync/layouts_program.py",
        str(folder),
        str(scratch),
        timeout=300,
        env={"PYTHONPATH": "."},
    ).check()
    return [json.loads(line[5:]) for line in out.splitlines() if line.startswith("CASE ")]


def test_every_layout_is_exact(outcomes: list[dict]) -> None:
    """The program itself compares every element; here: that it got to its end."""
    assert [(o["model"], o["options"]) for o in outcomes] == CASES


def test_sharded_sync_moves_less_than_gathering(outcomes: list[dict]) -> None:
    for outcome in outcomes:
        assert sum(outcome["received"]["tp2"]) < sum(outcome["received"]["tp2 whole"])


def test_equal_layouts_move_nothing(outcomes: list[dict]) -> None:
    """Actor TP 4 and engines of TP 4: all but vocabulary rows (padded to other multiples) are where they are needed."""
    (same,) = (o for o in outcomes if o["options"] == {"tensor_model_parallel_size": 4})
    vocabulary_bytes = 2 * 199 * 32 * 4
    assert sum(same["received"]["tp4"]) < vocabulary_bytes


def test_transformers_loads_the_exports(outcomes: list[dict], scratch: Path) -> None:
    """Without a missing or unexpected tensor, and with the values that the last push had."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.weight_sync.layouts_program import changed

    for model in ("qwen3_tied", "qwen2", "llama", "qwen3_moe"):
        number = next(i for i, (name, _) in enumerate(CASES) if name == model)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            scratch / str(number) / "export", dtype="auto", output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
        source = AutoModelForCausalLM.from_pretrained(scratch / "models" / model, dtype="auto")
        expected = source.state_dict()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, changed(expected[name])), f"{model}: {name}"
