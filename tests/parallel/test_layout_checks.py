"""Which layouts are refused, with which option named, and what the accepted ones look like."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.arch import ModelArch
from rhymemeg.config import ParallelOptions
from rhymemeg.errors import ConfigError
from rhymemeg.parallel.layout_checks import check_layout, describe_layout

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
DENSE = ModelArch.from_config(BASE)
MOE_CONFIG = {
    **BASE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MOE = ModelArch.from_config(MOE_CONFIG)

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
EP, ETP, SP, CP = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
)
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


@pytest.mark.parametrize(
    ("arch", "options", "ranks", "device", "message"),
    [
        (DENSE, {TP: 2}, 3, "cpu", "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 = 2 does not divide"),
        (DENSE, {TP: 3}, 3, "cpu", "--tensor-model-parallel-size 3 does not divide the model's 8 attention heads"),
        (DENSE, {TP: 8}, 8, "cpu", "--tensor-model-parallel-size 8 does not divide the model's 4 key-value heads"),
        (DENSE, {PP: 3}, 3, "cpu", "--pipeline-model-parallel-size 3 does not divide the model's 8 layers"),
        (DENSE, {VPP: 2}, 1, "cpu", "--num-layers-per-virtual-pipeline-stage 2 needs --pipeline-model-parallel-size > 1"),
        (DENSE, {PP: 2, VPP: 3}, 2, "cpu", "--num-layers-per-virtual-pipeline-stage 3 x .* does not divide"),
        (DENSE, {PP: 2, VPP: 4}, 2, "cpu", "only one virtual stage a rank"),
        (DENSE, {PP: 2, VPP: 2, FIRST: 2}, 2, "cpu", "cannot be combined with --decoder-first"),
        (DENSE, {PP: 4, FIRST: 1}, 4, "cpu", "--decoder-first-pipeline-num-layers 1 leaves 7 of 8 layers for the other 3"),
        (DENSE, {PP: 2, FIRST: 2, LAST: 2}, 2, "cpu", "leaves 4 of 8 layers for the other 0"),
        (DENSE, {FIRST: 2}, 1, "cpu", "--decoder-first-pipeline-num-layers 2 needs --pipeline-model-parallel-size > 1"),
        (DENSE, {SP: True}, 1, "cpu", "--sequence-parallel .* must be > 1"),
        (DENSE, {CP: 2}, 2, "cpu", "--context-parallel-size 2 needs a GPU: .*Transformer Engine"),
        (DENSE, {EP: 2}, 2, "cpu", "--expert-model-parallel-size 2: Qwen3ForCausalLM has no experts"),
        (DENSE, {ETP: 1}, 2, "cpu", "--expert-tensor-parallel-size 1: Qwen3ForCausalLM has no experts"),
        (DENSE, {"overlap_grad_reduce": True}, 1, "cpu", "--overlap-grad-reduce needs a GPU"),
        (DENSE, {"overlap_param_gather": True}, 1, "cuda", "--overlap-param-gather needs --overlap-grad-reduce"),
        (MOE, {"moe_grouped_gemm": True}, 1, "cpu", "--moe-grouped-gemm needs a GPU"),
        (MOE, {EP: 3}, 3, "cpu", "--expert-model-parallel-size 3 does not divide the model's 8 experts"),
        (MOE, {EP: 4}, 2, "cpu", "--expert-model-parallel-size 4 .* does not divide the number of ranks, 2"),
        (MOE, {TP: 2}, 2, "cpu", "--tensor-model-parallel-size 2 with experts needs --sequence-parallel"),
    ],
)  # fmt: skip
def test_refused(arch: ModelArch, options: dict[str, Any], ranks: int, device: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_layout(arch, ParallelOptions(**options), ranks, device)
    assert re.search(message, str(error.value)), error.value


def test_context_parallel_is_accepted_on_a_gpu() -> None:
    check_layout(DENSE, ParallelOptions(context_parallel_size=2), 2, "cuda")


def test_one_expert_a_token_with_normalised_weights_is_refused() -> None:
    arch = ModelArch.from_config({**MOE_CONFIG, "num_experts_per_tok": 1, "norm_topk_prob": True})
    with pytest.raises(ConfigError, match="num_experts_per_tok=1"):
        check_layout(arch, ParallelOptions(), 1, "cpu")


@pytest.mark.parametrize(
    ("options", "ranks", "stages"),
    [
        ({PP: 2}, 2, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        ({PP: 2, VPP: 2}, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ({PP: 4, FIRST: 1, LAST: 1}, 4, [[[0]], [[1, 2, 3]], [[4, 5, 6]], [[7]]]),
        ({PP: 2, LAST: 3}, 2, [[[0, 1, 2, 3, 4]], [[5, 6, 7]]]),
        ({PP: 2, FIRST: 3, LAST: 5}, 2, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
    ],
)
def test_layers_of_each_stage(options: dict[str, Any], ranks: int, stages: list[list[list[int]]]) -> None:
    parallel = ParallelOptions(**options)
    check_layout(DENSE, parallel, ranks, "cpu")
    assert [[list(run) for run in stage] for stage in describe_layout(DENSE, parallel, ranks).stages] == stages


@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 2]), st.sampled_from([1, 2, 4, 8, 16, 32]),
)  # fmt: skip
def test_every_accepted_layout_covers_everything_once(
    tp: int, pp: int, cp: int, ep: int, etp: int | None, ranks: int
) -> None:
    parallel = ParallelOptions(**{TP: tp, PP: pp, CP: cp, EP: ep, ETP: etp, SP: tp > 1})
    try:
        check_layout(MOE, parallel, ranks, "cuda")
    except ConfigError:
        return
    layout = describe_layout(MOE, parallel, ranks)
    places = list(layout.places())
    assert len({(p.tp, p.cp, p.dp, p.pp) for p in places}) == ranks == layout.tp * layout.cp * layout.dp * layout.pp
    assert len({(p.etp, p.ep, p.edp, p.pp) for p in places}) == ranks == layout.etp * layout.ep * layout.edp * layout.pp
    # The ranks of one data-parallel index hold every layer once a tensor and context rank.
    for dp in range(layout.dp):
        held = [layer for p in places if p.dp == dp for run in p.layers for layer in run]
        assert sorted(held) == sorted(list(range(8)) * tp * cp)
    assert layout.dp_rank_of == [p.dp for p in places]
