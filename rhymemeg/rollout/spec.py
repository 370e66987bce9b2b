"""What an engine is and how it samples: plain data, checked before anything starts. Pure: imports neither vLLM nor
torch.

`EngineSpec.from_config(config, arch, device_type)` collects what one engine needs; `check(world_size)` refuses
(`ConfigError`, naming the option) what could not run. `SamplingOptions` is what a request is sampled with.

Lengths are in tokens, memory in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config, RolloutOptions
from rhymemeg.errors import ConfigError

GIB = 1 << 30
# Tokens a KV block on CPU. vLLM's attention kernel wants a multiple of 32; its default of 128 is longer than many
# prompts, so that the samples of a group would share nothing of theirs.
CPU_BLOCK_SIZE = 32
CPU_BATCHED_TOKENS = 2048
# Widths of an attention head that vLLM's CPU kernel has.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of a response are drawn.

    The log-probability that the engine reports belongs to the distribution the token was drawn from:
    softmax(logits / temperature), renormalised over what top-k and top-p keep. At temperature 0 (greedy) it is
    softmax(logits).

    max_response_len counts all tokens of a response, those it had before it was resumed included. `stop` strings and
    `stop_token_ids` end a response (finish reason "stop"); the tokens that make them up are kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_len: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_response_len < 1:
            raise ConfigError(f"sampling options out of range: {self}")
        if any(not text for text in self.stop):
            raise ConfigError("--stop: an empty string would end every response at once")

    @classmethod
    def from_config(cls, options: RolloutOptions, temperature: float | None = None) -> SamplingOptions:
        """The section `rollout`; `temperature` overrides its temperature (evaluation)."""
        return cls(
            options.temperature if temperature is None else temperature,
            options.top_p,
            options.top_k,
            options.max_response_len,
            options.stop,
            options.stop_token_ids,
        )


def eos_token_ids(folder: str, arch: ModelArch) -> tuple[int, ...]:
    """End-of-sequence tokens of a model: those of config.json and those of generation_config.json, which is where chat
    models list the end of a turn."""
    file = Path(folder) / "generation_config.json"
    try:
        more = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        more = None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"--hf-checkpoint: {file} is not a JSON object: {error}") from None
    ids = [] if more is None else more if isinstance(more, list) else [more]
    return tuple(sorted({*arch.eos_token_ids, *ids}))


@dataclass(frozen=True)
class EngineSpec:
    """Everything that an engine is started with.

    max_prompt_len, max_response_len  what is asked of it; `max_model_len` is what vLLM is told
    kv_cache_memory   bytes of KV cache a rank; None: what `gpu_memory_utilization` leaves
    stop_token_ids    end-of-sequence tokens of the model
    speculative       vLLM's speculative_config, or None
    worker_extension  dotted name of a class that vLLM mixes into its worker, or ""
    load_format       "auto": weights of the folder, version 0; "dummy": none until `RolloutEngine.load_weights`
    return_routing    samples get the experts of their tokens (`rollout.routing`)
    """

    model: str
    arch: ModelArch
    device_type: str
    dtype: str
    tensor_parallel_size: int
    seed: int
    max_prompt_len: int
    max_response_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    enable_prefix_caching: bool
    enable_sleep_mode: bool
    enable_expert_parallel: bool
    block_size: int | None
    stop_token_ids: tuple[int, ...]
    speculative: Mapping[str, Any] | None = None
    worker_extension: str = ""
    load_format: str = "auto"
    return_routing: bool = False

    @classmethod
    def from_config(
        cls,
        config: Config,
        arch: ModelArch,
        device_type: str,
        *,
        speculative: Mapping[str, Any] | None = None,
        worker_extension: str = "",
        load_format: str = "auto",
    ) -> EngineSpec:
        """The engine of a run. On CPU: no CUDA graphs, no sleep mode, and a KV cache of a fixed size."""
        engine, cpu = config.engine, device_type == "cpu"
        routing = config.moe.moe_router_replay == "rollout"
        dtype = {"auto": "float32" if cpu else "bfloat16", "fp32": "float32", "bf16": "bfloat16"}
        return cls(
            model=config.model.hf_checkpoint,
            arch=arch,
            device_type=device_type,
            dtype=dtype[config.model.params_dtype],
            tensor_parallel_size=engine.vllm_tensor_parallel_size,
            seed=config.run.seed,
            max_prompt_len=config.rollout.max_prompt_len,
            max_response_len=config.rollout.max_response_len,
            max_num_seqs=engine.vllm_max_num_seqs,
            max_num_batched_tokens=engine.vllm_max_num_batched_tokens,
            kv_cache_memory=int(engine.vllm_kv_cache_memory_gib * GIB) if cpu else None,
            gpu_memory_utilization=engine.vllm_gpu_memory_utilization,
            enforce_eager=cpu or engine.vllm_enforce_eager,
            # Experts of tokens that come from the cache are not known on CPU (`vllm_compat.RoutingCapture`).
            enable_prefix_caching=engine.vllm_enable_prefix_caching and not (cpu and routing),
            enable_sleep_mode=engine.vllm_enable_sleep_mode and not cpu,
            enable_expert_parallel=engine.vllm_enable_expert_parallel,
            block_size=CPU_BLOCK_SIZE if cpu else None,
            stop_token_ids=eos_token_ids(config.model.hf_checkpoint, arch),
            speculative=speculative,
            worker_extension=worker_extension,
            load_format=load_format,
            return_routing=routing,
        )

    @property
    def max_model_len(self) -> int:
        """Longest sequence the engine is built for. Beyond prompt and response there is room for one token, so that
        `score` takes full sequences, and for a draft, because vLLM drops the drafts of a whole step in which one
        request has no room for one; both only as far as the model goes."""
        draft = int(self.speculative.get("num_speculative_tokens", 32)) if self.speculative else 0
        wanted = self.max_prompt_len + self.max_response_len + 1 + draft
        return min(wanted, self.arch.max_position_embeddings)

    @property
    def enable_chunked_prefill(self) -> bool:
        """Not on CPU: after a part of a prompt vLLM takes back the draw of the request's generator, which torch's CPU
        generators cannot do."""
        return self.device_type != "cpu"

    @property
    def batched_tokens(self) -> int | None:
        """Most tokens a step takes; None: vLLM's choice. Without chunks a whole sequence must fit."""
        if self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens or CPU_BATCHED_TOKENS, self.max_model_len)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token on one rank."""
        heads = -(-self.arch.num_key_value_heads // self.tensor_parallel_size)
        width = 2 if self.dtype == "bfloat16" else 4
        return 2 * self.arch.num_layers * heads * self.arch.head_dim * width

    def check(self, world_size: int) -> None:
        """Refuse what cannot run on `world_size` ranks."""
        arch, tp = self.arch, self.tensor_parallel_size
        option = f"--vllm-tensor-parallel-size {tp}"
        if world_size % tp:
            raise ConfigError(f"{option} does not divide the world size {world_size}")
        if arch.num_attention_heads % tp:
            raise ConfigError(f"{option} does not divide the {arch.num_attention_heads} attention heads")
        if arch.num_key_value_heads % tp and tp % arch.num_key_value_heads:
            raise ConfigError(
                f"{option} is neither a divisor nor a multiple of the {arch.num_key_value_heads} key-value heads"
            )
        if self.return_routing and self.device_type != "cpu" and not self.enable_prefix_caching:
            raise ConfigError(
                "--moe-router-replay rollout: vLLM returns experts only with --vllm-enable-prefix-caching True"
            )
        if self.device_type == "cpu" and arch.head_dim not in CPU_HEAD_SIZES:
            raise ConfigError(
                f"--hf-checkpoint: the engine's CPU attention has no heads of width {arch.head_dim} (it has "
                f"{', '.join(map(str, CPU_HEAD_SIZES))})"
            )
        if self.max_prompt_len + self.max_response_len > arch.max_position_embeddings:
            raise ConfigError(
                f"--max-prompt-len + --max-response-len = {self.max_prompt_len + self.max_response_len} exceeds the "
                f"model's max_position_embeddings = {arch.max_position_embeddings}"
            )
        if self.kv_cache_memory is not None:
            block = self.block_size or 16
            # vLLM keeps one block for itself.
            needed = (-(-self.max_model_len // block) + 1) * block * self.kv_bytes_per_token
            if self.kv_cache_memory < needed:
                raise ConfigError(
                    f"--vllm-kv-cache-memory-gib {self.kv_cache_memory / GIB:.4g} holds "
                    f"{self.kv_cache_memory // self.kv_bytes_per_token} tokens, but the longest prompt and response "
                    f"need {self.max_model_len}: give at least {needed / GIB:.2g} GiB, or lower --max-response-len"
                )
