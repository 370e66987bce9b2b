"""Model descriptions from config.json: against transformers' own parameter counts, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError

SMALL = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "extra"),
    [("Llama", {}), ("Qwen2", {}), ("Qwen3", {"head_dim": 16}), ("Qwen3Moe", {"head_dim": 16} | MOE)],
)
def test_parameter_count_is_that_of_transformers(kind: str, extra: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**SMALL, **extra, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [f"{kind}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    arch = ModelArch.from_pretrained(tmp_path)
    assert arch.num_parameters() == sum(p.numel() for p in model.parameters())
    assert arch.tie_word_embeddings == tied
    assert [arch.layer_is_moe(i) for i in range(3)] == [hasattr(x.mlp, "experts") for x in model.model.layers]


def good(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, **SMALL} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_size": "big"}, "'hidden_size' must be a positive integer, got 'big'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"quantization_config": {"bits": 4}}, "a quantised checkpoint is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope scaling 'yarn' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelArch.from_config(good(**changes))


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model folder '.*nowhere' does not exist"):
        ModelArch.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        ModelArch.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelArch.from_pretrained(tmp_path)


def test_both_spellings_of_rope() -> None:
    new = ModelArch.from_config(good(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    old = ModelArch.from_config(good(rope_theta=5e5))
    assert new.rope_theta == old.rope_theta == 5e5 and new.rope_scaling is None
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = ModelArch.from_config(good(rope_scaling=llama3, rope_theta=1e4))
    assert scaled.rope_scaling == llama3 and scaled.rope_theta == 1e4
