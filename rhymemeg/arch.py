"""What a model is, read from a Hugging Face `config.json`. Pure: needs neither torch nor transformers.

`ModelArch.from_pretrained(folder)` reads the file and returns a frozen description that the Megatron model builder, the
weight layouts, the engines and the memory planner share. An architecture or feature that is not supported is refused
with its name (`ConfigError`); nothing is guessed silently.

Supported architectures: LlamaForCausalLM (Llama 2/3), Qwen2ForCausalLM (Qwen2, Qwen2.5), Qwen3ForCausalLM,
Qwen3MoeForCausalLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymemeg.errors import ConfigError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True)
class ModelArch:
    """Sizes in elements. `dense_layers` are the global indices (from 0) of layers without experts in a MoE model."""

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    def layer_is_moe(self, layer: int) -> bool:
        """Whether global layer `layer` (from 0) has experts."""
        return self.is_moe and layer not in self.dense_layers

    def padded_vocab_size(self, divisible_by: int, tensor_parallel: int) -> int:
        """Megatron's vocabulary size: the smallest multiple of `divisible_by * tensor_parallel` that holds it."""
        unit = divisible_by * tensor_parallel
        return -(-self.vocab_size // unit) * unit

    def num_parameters(self) -> int:
        """Number of trainable parameters, tied embeddings counted once."""
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        attention = h * (q + 2 * kv) + q * h + (q + 2 * kv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)
        moe_layers = sum(self.layer_is_moe(layer) for layer in range(self.num_layers))
        expert = 3 * h * self.moe_intermediate_size
        mlps = (self.num_layers - moe_layers) * 3 * h * self.intermediate_size
        mlps += moe_layers * (self.num_experts * expert + self.num_experts * h)
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + 2 * h) + mlps + embeddings + h

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelArch:
        """Read `folder/config.json`. Raises ConfigError naming the folder, file, architecture or key."""
        path = Path(folder)
        if not path.is_dir():
            raise ConfigError(f"--hf-checkpoint: model folder {str(folder)!r} does not exist")
        file = path / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"--hf-checkpoint: {file} is missing, so {str(folder)!r} is no model folder") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--hf-checkpoint: {file} is not valid JSON: {error}") from None
        return cls.from_config(config, where=str(file))

    @classmethod
    def from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelArch:
        """Build from the parsed `config.json`; `where` is named in errors."""
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: expected a JSON object, got {type(config).__name__}")
        names = config.get("architectures") or []
        name = names[0] if isinstance(names, list) and names else None
        if name not in FAMILIES:
            raise ConfigError(
                f"{where}: architecture {name!r} is not supported (supported: {', '.join(sorted(FAMILIES))})"
            )
        family = FAMILIES[name]

        def need(key: str) -> int:
            value = config.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{where}: {key!r} must be a positive integer, got {value!r}")
            return value

        def refuse(condition: bool, what: str) -> None:
            if condition:
                raise ConfigError(f"{where}: {what} is not supported for {name}")

        heads, hidden, layers = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ConfigError(
                f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        refuse(config.get("hidden_act", "silu") != "silu", f"hidden_act={config.get('hidden_act')!r}")
        refuse(bool(config.get("mlp_bias")), "mlp_bias=true")
        refuse(bool(config.get("attention_bias")), "attention_bias=true")
        refuse(bool(config.get("use_sliding_window")), "use_sliding_window=true")
        refuse(bool(config.get("quantization_config")), "a quantised checkpoint")
        theta, scaling = _rope(config, where)
        moe: dict[str, Any] = {}
        if family == "qwen3_moe":
            step = config.get("decoder_sparse_step", 1) or 1
            only = set(config.get("mlp_only_layers") or ())
            # transformers 5 writes the number of experts under another name than the released checkpoints.
            experts = need("num_experts" if "num_experts" in config else "num_local_experts")
            top_k = need("num_experts_per_tok")
            if top_k > experts:
                raise ConfigError(f"{where}: num_experts_per_tok={top_k} exceeds num_experts={experts}")
            moe = dict(
                num_experts=experts,
                num_experts_per_tok=top_k,
                moe_intermediate_size=need("moe_intermediate_size"),
                norm_topk_prob=bool(config.get("norm_topk_prob", False)),
                dense_layers=tuple(i for i in range(layers) if i in only or (i + 1) % step),
            )
        eos = config.get("eos_token_id")
        return cls(
            architecture=name,
            family=family,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate_size=need("intermediate_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=need("max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
            **moe,
        )


def _rope(config: dict[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotary embedding: transformers 5 writes `rope_parameters`, older versions
    `rope_theta` and `rope_scaling`. Only no scaling and Llama 3's are supported."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"{where}: rope scaling {kind!r} is not supported (supported: default, llama3)")
    return theta, parameters
