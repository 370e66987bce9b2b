"""The command that plans without a process group."""

import json
from pathlib import Path
from typing import Any

import pytest

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError
from rhymemeg.weight_sync.deepseek import DeepseekArch, describe
from rhymemeg.weight_sync.layouts import hf_tensors
from rhymemeg.weight_sync.plan import main
from tests.weight_sync.models import DEEPSEEK, config

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, Any], *words: str) -> dict[str, Any]:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(model))
    assert main(["--model", str(file), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_layout_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config("Qwen3ForCausalLM", vocab_size=256)
    report = run(tmp_path, capsys, model, "--actor", "tp=2,pp=2,dp=2", "--engine", "tp=2", "--ranks-per-node", "4")
    plan, size = report["plan"], report["model_bytes"]
    assert (report["ranks"], report["engines"]) == (8, 4)
    assert size == 2 * ModelArch.from_config(model).num_parameters()
    assert plan["wire_bytes"] == plan["least_wire_bytes"]
    # Each rank needs half of the model's matrices and holds about a quarter: the other stage's half of its half.
    assert 0.2 * size < plan["received_bytes_mean"] < 0.3 * size
    # Stages are nodes here, so nothing that travels stays within one.
    assert plan["wire_bytes_in_node"] == 0
    assert report["gather"]["wire_bytes"] > 2 * plan["wire_bytes"]


def test_equal_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config("LlamaForCausalLM", vocab_size=256)
    report = run(tmp_path, capsys, model, "--actor", "tp=2,dp=4", "--engine", "tp=2")
    assert report["plan"]["wire_bytes"] == 0
    assert report["plan"]["estimated_seconds"] == 0


def test_deepseek_v3_on_2048_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "tp=8,pp=16,ep=32,etp=1,dp=16,first=3,last=2"
    report = run(tmp_path, capsys, DEEPSEEK_V3, "--actor", sizes, "--engine", "tp=8")
    plan = report["plan"]
    assert report["tensors"] == len(hf_tensors(describe(DEEPSEEK_V3)))
    assert plan["wire_bytes"] == plan["least_wire_bytes"]
    assert plan["sent_bytes_largest"] < 1.1 * plan["sent_bytes_mean"]
    assert plan["estimated_seconds"] < report["gather"]["estimated_seconds"]
    assert report["planning_peak_mib"] < 2048


def test_deepseek_v3_has_its_published_size() -> None:
    """671 billion parameters without the multi-token-prediction layer."""
    arch = describe(DEEPSEEK_V3)
    assert isinstance(arch, DeepseekArch)
    assert 670e9 < arch.num_parameters() < 672e9


def test_deepseek_tensors_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    settings = {k: v for k, v in DEEPSEEK.items() if k != "architectures"}
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**settings, num_key_value_heads=8, n_group=1, topk_group=1)
        )
    expected = {n: tuple(t.shape) for n, t in model.state_dict().items() if ".experts." not in n}
    ours = {n: s for n, s in hf_tensors(describe(DEEPSEEK)).items() if ".experts." not in n}
    assert ours == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--actor", "tp=3"], "--tensor-model-parallel-size 3"),
        (["--actor", "tp=2,world=3"], "does not divide the number of ranks"),
        (["--actor", "xp=2"], "--actor: 'xp=2' is not one of"),
        (["--actor", "tp=two"], "--actor: 'tp=two'"),
        (["--actor", "dp=2", "--engine", "tp=4"], "--engine: world size 2"),
        (["--actor", "dp=8", "--engine", "tp=8"], "engine of tp=8"),
    ],
)
def test_sizes_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config("Qwen3ForCausalLM")))
    assert main(["--model", str(file), *words]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        describe({**DEEPSEEK, "kv_lora_rank": None})


@pytest.mark.parametrize(
    "words",
    [
        ["--ranks-per-node", "0"],
        ["--layers-in-flight", "0"],
        ["--make-vocab-size-divisible-by", "0"],
        ["--bucket-mib", "-1"],
        ["--network-gb-per-s", "nan"],
    ],
)
def test_numbers_out_of_range_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "none", *words]) == 2
    error = capsys.readouterr().err
    assert words[0] in error and error.count("\n") == 1
