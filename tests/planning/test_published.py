"""Against figures that others have published, with the error that is allowed."""

from __future__ import annotations

import pytest

from rhymemeg.histopipe.cost import A100_7B
from rhymemeg.parallel.layout_checks import describe_layout
from rhymemeg.planning.compute import active_parameters, engine_cost, forward_flops
from rhymemeg.planning.hardware import GPUS
from rhymemeg.planning.memory import kv_bytes_per_token, optimizer_bytes
from rhymemeg.planning.shards import actor_shards
from tests.planning.models import arch, config

# Billions of parameters on the model cards: all, without embedding and output layer, active a token.
CARDS = {
    "Qwen3-8B": (8.2, 6.95, None),
    "Qwen3-14B": (14.8, 13.2, None),
    "Qwen3-32B": (32.8, 31.2, None),
    "Qwen3-30B-A3B": (30.5, 29.9, 3.3),
    "Qwen3-235B-A22B": (235.0, 234.0, 22.0),
    "DeepSeek-V3": (671.0, None, 37.0),
}


@pytest.mark.parametrize("name", CARDS)
def test_parameters(name: str) -> None:
    a = arch(name)
    total, inner, active = CARDS[name]
    assert a.num_parameters() / 1e9 == pytest.approx(total, rel=0.005)
    if inner is not None:
        assert (a.num_parameters() - 2 * a.vocab_size * a.hidden_size) / 1e9 == pytest.approx(inner, rel=0.005)
    if active is not None:  # the cards count the embedding as active, and round
        assert (active_parameters(a) + a.vocab_size * a.hidden_size) / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("name", "published"), [("DeepSeek-V3", 70_272), ("Qwen2.5-72B", 327_680), ("Llama-3.1-405B", 516_096)]
)
def test_keys_and_values_of_a_token(name: str, published: int) -> None:
    """arXiv 2505.09343, table 1: bytes a token in BF16."""
    assert kv_bytes_per_token(arch(name), 1, 2) == published


@pytest.mark.parametrize(("name", "published"), [("DeepSeek-V3", 250e9), ("Llama-3.1-405B", 2448e9)])
def test_training_flops_of_a_token(name: str, published: float) -> None:
    """The same paper, table 2: sequences of 4,096 tokens, causal attention."""
    assert 3 * forward_flops(arch(name), 4096) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "distributed", "published"),
    [(2, False, 18.0), (2, True, 6 + 12 / 8), (4, False, 16.0), (4, True, 8 + 8 / 8)],
)
def test_bytes_a_parameter(dtype: int, distributed: bool, published: float) -> None:
    """The table in Megatron Core's description of its distributed optimizer, for 8 data-parallel ranks."""
    a, c = arch("Qwen3-8B"), config()
    layout = describe_layout(a, c.parallel, 8)
    (shard,) = actor_shards(a, layout, a.vocab_size)
    assert shard.total == a.num_parameters()
    found = shard.total * (dtype + 4) + optimizer_bytes(shard, layout, dtype, distributed)
    assert found / shard.total == pytest.approx(published, rel=1e-6)


def test_decode_steps_of_a_7b_model_on_an_a100() -> None:
    """The floor of a decode step against the published sweep of Qwen2.5-7B at 2,048 tokens of context (EfficientRollout,
    arXiv 2606.18967): measured steps take 1.1 to 1.5 times as long. `Efficiency.rollout` and `step_overhead` are fitted
    to it."""
    a = arch("Qwen2.5-7B")
    floor = engine_cost(a, config(vllm_max_num_seqs=64), GPUS["a100"], 2, kv_bytes_per_token(a, 1, 2), 2048)
    for running, (measured, *_) in zip(A100_7B.concurrency, A100_7B.seconds):
        bound = float(floor.step_seconds(running))
        assert 0.65 < bound / measured < 0.95
        assert bound / 0.8 + 0.5e-3 == pytest.approx(measured, rel=0.15)


def test_deepseek_training_rate() -> None:
    """DeepSeek-V3 took 180,000 H800 hours a trillion tokens (arXiv 2412.19437): the share of the BF16 peak that this is
    by our count of operations."""
    flops = 3 * forward_flops(arch("DeepSeek-V3"), 4096) * 1e12
    share = flops / (180_000 * 3600 * GPUS["h800"].flops)
    assert share == pytest.approx(0.39, abs=0.02)
