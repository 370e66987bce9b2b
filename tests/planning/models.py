"""Published models, by the sizes in their `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.dry_run import read_arch

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ROOT / "launch" / "models"
NAMES = sorted(folder.name for folder in FOLDERS.iterdir())


def arch(name: str) -> ModelArch:
    """One of launch/models, or of `OTHERS`."""
    if name in OTHERS:
        return ModelArch.from_config(OTHERS[name])
    return read_arch(str(FOLDERS / name))


def config(**changes: Any) -> Config:
    """A configuration for large models, with changes by option name."""
    tree = {
        "hf_checkpoint": "model",
        "prompt_data": "prompts.jsonl",
        "max_prompt_len": 1024,
        "max_response_len": 8192,
        "max_tokens_per_microbatch": 9216,
    }
    return Config.from_tree(tree | changes, where="test")


def _dense(architecture: str, h: int, layers: int, heads: int, kv: int, f: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": f,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
    }


OTHERS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": _dense("Qwen2ForCausalLM", 3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-72B": _dense("Qwen2ForCausalLM", 8192, 80, 64, 8, 29568, 152064),
    "Llama-3.1-405B": _dense("LlamaForCausalLM", 16384, 126, 128, 8, 53248, 128256),
}


def write(folder: Path, tree: dict[str, Any]) -> Path:
    """A model folder with nothing but its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tree))
    return folder
