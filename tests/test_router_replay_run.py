"""The engine's experts in the trainer: what the engine reports is what a pass over the same tokens finds, and replaying it
brings the two closer. With real engines, and once as a user would start it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import ROOT, torchrun

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

QUICKSTART = Path("launch/quickstart_model")


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "found.json"
    sizes = ("--prompts", "8", "--samples-per-prompt", "2", "--response-len", "64")
    torchrun(
        1, "tools/router_replay.py", *sizes, "--json", str(file), *arguments, env={"PYTHONPATH": str(ROOT)}
    ).check()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_reported_experts_are_those_of_the_same_tokens(tmp_path: Path) -> None:
    """In fp32 hardly a token is near enough to a tie for two implementations to differ: a shift of the rows by one position
    or layer, or drafts counted as tokens, would send nearly all elsewhere."""
    found = measured(tmp_path, "--dtype", "fp32", "--drafts")
    assert found["own routing"]["sent_elsewhere"] < 1e-3
    assert found["replayed"]["sent_elsewhere"] == 0
    assert found["replayed"]["max_abs_diff"] < 1e-4


def test_replay_brings_trainer_and_engine_closer(tmp_path: Path) -> None:
    found = measured(tmp_path, "--dtype", "bf16")
    own, replayed = found["own routing"], found["replayed"]
    assert own["sent_elsewhere"] > 0.005 and replayed["sent_elsewhere"] == 0
    assert replayed["mean_abs_diff"] < 0.7 * own["mean_abs_diff"]
    assert replayed["kl"] < 0.3 * own["kl"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with the quickstart model's tokenizer."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("moe")
    for file in QUICKSTART.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder)
    small = AutoConfig.from_pretrained(QUICKSTART)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=small.vocab_size,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        eos_token_id=small.eos_token_id,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("replay", "layout", "changed"),
    [
        ("rollout", ("--expert-model-parallel-size", "2"), 1e-3),
        ("actor", ("--pipeline-model-parallel-size", "2", "--num-minibatches", "2"), 0.2),
    ],
)
def test_a_run_with_replay(replay: str, layout: tuple[str, ...], changed: float, model: Path, tmp_path: Path) -> None:
    torchrun(
        2, "--module", "rhymemeg.train", "--config", "launch/configs/quickstart.yaml", "--display", "lines",
        "--hf-checkpoint", str(model), "--tensor-model-parallel-size", "1", *layout, "--moe-router-replay", replay,
        "--moe-aux-loss-coeff", "0.01", "--train-iters", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
        "--max-response-len", "48", "--num-prompts", "8", "--eval-interval", "0", "--save-final", "False",
        "--export-hf", "False", "--output-dir", str(tmp_path),
    ).check()  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["actor/train_rollout_logprob_abs_diff"] < 1e-4
        assert 0 <= row["moe/replay_changed"] < changed
        assert 1 <= row["moe/load_max_over_mean"] <= 8 and 0 < row["moe/load_entropy"] <= 1
        assert 0.01 <= row["moe/aux_loss"] < 0.05  # 0.01 a layer, and two of them, where the load is even
