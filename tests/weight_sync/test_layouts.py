"""The tables against the independent construction of Megatron's shards in `reference.py`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.arch import ModelArch
from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import slices
from rhymemeg.weight_sync.layouts import ModelLayout, canonical_suffix, hf_tensors, pieces
from tests.weight_sync.models import ARCHITECTURES, arch, random_arch
from tests.weight_sync.reference import megatron_shard, numbered

SIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelArch, int, int, int]:
    tp, etp = draw(SIZES), draw(SIZES)
    a = draw(random_arch(tp, etp))
    return a, tp, etp, a.padded_vocab_size(draw(st.sampled_from([1, 3, 8])), tp)


@settings(max_examples=80)
@given(cases())
def test_shards_equal_megatrons_and_cover_every_element_once(case: tuple[ModelArch, int, int, int]) -> None:
    a, tp, etp, padded = case
    hf = numbered(a)
    layout = ModelLayout(a)
    written = {name: np.zeros(t.shape, int) for name, t in hf.items()}
    rebuilt = {name: np.zeros(t.shape, int) for name, t in hf.items()}
    for p in layout.parameters():
        size = tp if p.expert is None else etp
        for rank in range(size):
            shape = layout.local_shape(p.name, tp, etp, padded)
            local = np.zeros(shape, int)
            found = layout.pieces(p.name, rank % tp, tp, rank % etp, etp, padded)
            for piece in found:
                local[slices(piece.local_box)] = hf[piece.hf_name][slices(piece.hf_box)]
            np.testing.assert_array_equal(local, megatron_shard(a, hf, p.name, rank, size, padded))
            for piece in found:
                rebuilt[piece.hf_name][slices(piece.hf_box)] = local[slices(piece.local_box)]
                if len(found) > 1 or piece.hf_box != tuple((0, n) for n in hf[piece.hf_name].shape) or rank == 0:
                    written[piece.hf_name][slices(piece.hf_box)] += 1
    for name in hf:
        np.testing.assert_array_equal(rebuilt[name], hf[name])
        assert (written[name] == 1).all(), name


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_those_that_transformers_writes(name: str, tied: bool) -> None:
    """Names and shapes against the module that transformers builds."""
    transformers = pytest.importorskip("transformers")
    import torch

    from tests.weight_sync.models import config

    settings_ = {k: v for k, v in config(name, tie_word_embeddings=tied).items() if k != "architectures"}
    model_config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**settings_)
    with torch.device("meta"):
        model = getattr(transformers, name)(model_config)
    expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    if name == "Qwen3MoeForCausalLM":  # in memory transformers fuses the experts; on disk they are separate
        expected = {n: s for n, s in expected.items() if ".experts." not in n}
    ours = hf_tensors(arch(name, tie_word_embeddings=tied))
    if name == "Qwen3MoeForCausalLM":
        assert len([n for n in ours if ".experts." in n]) == 4 * 4 * 3
        ours = {n: s for n, s in ours.items() if ".experts." not in n}
    assert ours == expected
    assert (
        sum(np.prod(s) for s in hf_tensors(arch(name, tie_word_embeddings=tied)).values())
        == arch(name, tie_word_embeddings=tied).num_parameters()
    )


def test_output_layer_of_tied_embeddings_is_the_embedding() -> None:
    a = arch("Qwen3ForCausalLM", tie_word_embeddings=True)
    assert "lm_head.weight" not in hf_tensors(a)
    (piece,) = pieces(a, "output_layer.weight", 0, 2, 0, 1, 256)
    assert piece.hf_name == "model.embed_tokens.weight"
    assert piece.hf_box == ((0, 128), (0, 32))


def test_padding_rows_belong_to_nothing() -> None:
    a = arch("LlamaForCausalLM", vocab_size=5)
    assert [pieces(a, "output_layer.weight", r, 4, 0, 1, 16) for r in (2, 3)] == [[], []]
    (piece,) = pieces(a, "output_layer.weight", 1, 4, 0, 1, 16)
    assert (piece.hf_box[0], piece.local_box[0]) == ((4, 5), (0, 1))


def test_fused_norms_are_the_separate_ones() -> None:
    assert canonical_suffix("self_attention.linear_qkv.layer_norm_weight") == "input_layernorm.weight"
    assert canonical_suffix("mlp.linear_fc1.layer_norm_weight") == "pre_mlp_layernorm.weight"


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.9.input_layernorm.weight", "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", "x"],
)
def test_unknown_parameters_are_named(name: str) -> None:
    with pytest.raises(WeightSyncError, match=name):
        pieces(arch("Qwen3ForCausalLM"), name, 0, 1, 0, 1, 256)


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(WeightSyncError, match=r"linear_fc1.*gate_proj.*48.*divisible by 5"):
        pieces(arch("Qwen3ForCausalLM"), "decoder.layers.0.mlp.linear_fc1.weight", 0, 5, 0, 1, 256)
