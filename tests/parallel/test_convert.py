"""Conversion between Hugging Face folders and Megatron checkpoints. That the result is what Megatron itself reads and
writes is checked with real actors in `checkpoint_worker`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rhymemeg.parallel.convert import main
from rhymemeg.parallel.torch_dist import TensorReader
from rhymemeg.weight_sync.deepseek import describe
from rhymemeg.weight_sync.layouts import ModelLayout
from tests.parallel import cases


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].view(torch.uint8).equal(b[k].view(torch.uint8)) for k in a
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in cases.MODELS:
        cases.make_model(name, folder / name)
    return folder


@pytest.mark.parametrize("name", cases.MODELS)
def test_there_and_back_is_the_same(name: str, models: Path, tmp_path: Path) -> None:
    assert main(["to-megatron", str(models / name), str(tmp_path / "m")]) == 0
    assert main(["to-hf", str(tmp_path / "m"), str(tmp_path / "h")]) == 0
    assert same(tensors(tmp_path / "h"), tensors(models / name))
    assert json.loads((tmp_path / "h/config.json").read_text())["architectures"]


def test_deepseek_v3_there_and_back(tmp_path: Path) -> None:
    """Latent attention, shared and routed experts, the routers' biases in fp32: tensors of random values."""
    sizes = {"vocab_size": 130, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    attention = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config = sizes | attention | experts | {"intermediate_size": 48, "moe_intermediate_size": 16}
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 64}  # type: ignore[dict-item]
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    layout = ModelLayout(describe(config))
    values = {}
    for p in layout.parameters():
        for part in p.rule.parts:
            dtype = torch.float32 if part.float32 else torch.bfloat16
            values[p.hf_name(part)] = torch.randn(part.shape, generator=generator).to(dtype)
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    assert main(["to-megatron", str(source), str(tmp_path / "m")]) == 0
    names = TensorReader(tmp_path / "m").tensors
    assert "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight" in names
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in names
    assert main(["to-hf", str(tmp_path / "m"), str(tmp_path / "h")]) == 0
    assert same(tensors(tmp_path / "h"), values)


def test_bf16_in_many_files(models: Path, tmp_path: Path) -> None:
    source = shutil.copytree(models / "qwen3_moe_mixed", tmp_path / "bf16")
    values = {k: v.bfloat16() for k, v in load_file(source / "model.safetensors").items()}
    values["model.layers.2.mlp.experts.1.up_proj.weight"][0, 0] = float("nan")
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    small = ["--max-file-gib", str(50_000 / 2**30)]
    assert main(["to-megatron", str(source), str(tmp_path / "m"), *small]) == 0
    assert len(list((tmp_path / "m").glob("*.distcp"))) > 3
    assert main(["to-hf", str(tmp_path / "m"), str(tmp_path / "h"), *small]) == 0
    assert len(list((tmp_path / "h").glob("*.safetensors"))) > 3
    assert same(tensors(tmp_path / "h"), values)


def test_stacks_are_those_of_megatron(models: Path, tmp_path: Path) -> None:
    """Gate above up in fc1, heads by query group in qkv, layers and experts along first axes, rows of padding at the end."""
    assert main(["to-megatron", str(models / "qwen3"), str(tmp_path / "m")]) == 0
    reader, hf = TensorReader(tmp_path / "m"), tensors(models / "qwen3")
    fc1 = reader.read("decoder.layers.mlp.linear_fc1.weight", ((2, 3), (0, 192), (0, 64)))[0]
    gate, up = (hf[f"model.layers.2.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert fc1.equal(torch.cat([gate, up]))
    qkv = reader.read("decoder.layers.self_attention.linear_qkv.weight", ((1, 2), (0, 256), (0, 64)))[0]
    q, k, v = (hf[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    assert qkv.equal(torch.cat([q[:64], k[:32], v[:32], q[64:], k[32:], v[32:]]))  # 4 query heads, 2 groups, width 32
    assert reader.tensors["embedding.word_embeddings.weight"].size == torch.Size([384, 64])


@pytest.mark.parametrize("damage", ["target exists", "corrupt", "another model", "no tensor", "no model folder"])
def test_one_message_and_nothing_left(
    damage: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "m", tmp_path / "h"
    assert main(["to-megatron", str(models / "qwen3"), str(source)]) == 0
    words: list[str] = []
    if damage == "target exists":
        target.mkdir()
        (target / "mine").write_text("keep")
    elif damage == "corrupt":
        file = source / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[5000] ^= 1
        file.write_bytes(data)
    elif damage == "another model":
        other = shutil.copytree(models / "qwen3", tmp_path / "m" / "other")
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
        words = ["--model", str(other)]
    elif damage == "no tensor":
        words = ["--model", str(models / "qwen3_moe")]
    else:
        words = ["--model", str(tmp_path / "nowhere")]
    text = {
        "target exists": "exists; nothing is overwritten",
        "corrupt": "__0_0.distcp is corrupt",
        "another model": "the model has [",
        "no tensor": "lacks decoder.layers.0.mlp.router.weight",
        "no model folder": "nowhere",
    }[damage]
    capsys.readouterr()
    assert main(["to-hf", str(source), str(target), *words]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and text in said
    assert sorted(p.name for p in tmp_path.iterdir()) == (["h", "m"] if damage == "target exists" else ["m"])
