"""Every supported family: the engine agrees with transformers, also after starting without weights and receiving
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rhymemeg.arch import ModelArch
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.samples import Sample, SampleId
from rhymemeg.rollout.window import run_samples
from tests.rollout import tiny

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "initializer_range": 0.15,
}
# 48 is no multiple of what the CPU kernel wants, so that the packed weights are also padded.
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "head_dim": 32}
FAMILIES = {
    "Llama": {"tie_word_embeddings": False, "head_dim": 32},
    "Qwen2": {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1},
    "Qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "Qwen3Moe": {"tie_word_embeddings": False} | MOE,
}


@pytest.mark.engine
@pytest.mark.parametrize("family", list(FAMILIES))
def test_same_log_probs_as_transformers(family: str, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family]))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide one that is not loaded
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    arch = ModelArch.from_pretrained(tmp_path)
    engine = RolloutEngine(tiny.spec(tmp_path, arch, load_format="dummy"), tiny.one_rank())
    try:
        assert engine.version == -1
        engine.load_weights(weights.items(), 0)  # the names expected of the family are those of its checkpoint
        for update in range(2):
            samples = [Sample(SampleId(update, p, 0), (2 + p, 9, 30, 7)) for p in range(4)]
            for s in run_samples(engine, samples, SamplingOptions(max_response_len=40), 0, timeout=100):
                tokens = torch.tensor([[*s.prompt_ids, *s.response_ids]])
                with torch.no_grad():
                    log_probs = model(tokens).logits[0, 3:-1].log_softmax(-1)
                expected = log_probs.gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
                assert torch.allclose(torch.tensor(s.log_probs), expected, atol=1e-4)
            # Twice, because a second update has broken mixture-of-experts layers before.
            engine.load_weights(weights.items(), update + 1)
    finally:
        engine.close()
