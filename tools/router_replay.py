"""What replaying the engine's experts does to the train/rollout difference, on a small random Qwen3-MoE.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 tools/router_replay.py --dtype bf16

One process holds an engine and an actor of the same weights. The engine samples, and the actor computes the log-probabilities
of the same tokens twice: routing by itself, and with the experts that the engine used. Printed are the differences between
the actor's and the engine's log-probabilities over all response tokens, the KL from the engine to the actor by the k3
estimator, and the share of (token, layer) pairs that the actor itself would have sent to other experts; with the replay, also
whether every token with a known choice went where the engine had sent it. `--json FILE` writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.rl.batching import MicroBatch, TrainSample, collate
from rhymemeg.rollout.routing import replayable
from rhymemeg.rollout.samples import Sample, SampleId

VOCAB, EXPERTS, K, LAYERS = 512, 16, 4, 6


def make_model(folder: Path, seed: int) -> None:
    """A random Qwen3-MoE whose distributions are neither flat nor peaked."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=1,
        bos_token_id=0,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


def options(model: Path, dtype: str, response_len: int) -> Config:
    tree = {
        "hf_checkpoint": str(model),
        "params_dtype": dtype,
        "moe_router_replay": "rollout",
        "max_prompt_len": 32,
        "max_response_len": response_len,
        "vllm_max_num_seqs": 64,
        "vllm_kv_cache_memory_gib": 0.25,
        "device": "cpu",
    }
    return Config.from_tree(tree, where="router_replay")


def sample(engine: Any, prompts: int, samples_per_prompt: int, response_len: int) -> list[Sample]:
    """Responses to random prompts, at temperature 1. All are paused once and continue, as samples do that a window leaves to
    the next."""
    from rhymemeg.rollout.engine import SamplingOptions

    random = np.random.default_rng(0)
    done: list[Sample] = []
    sampling = SamplingOptions(max_response_len=response_len)
    for p in range(prompts):
        prompt = tuple(random.integers(2, VOCAB, int(random.integers(4, 32))).tolist())
        for i in range(samples_per_prompt):
            engine.add(Sample(SampleId(0, p, i), prompt), sampling, seed=p * 100 + i)
    for _ in range(response_len // 4):
        done += engine.step().finished
    for n, paused in enumerate(engine.pause()):
        engine.add(paused, sampling, seed=10_000 + n)
    while engine.has_unfinished():
        done += engine.step().finished
    return sorted(done, key=lambda s: s.sample_id)


def batch_of(samples: list[Sample], arch: ModelArch) -> MicroBatch:
    """One micro-batch with the engine's log-probabilities and experts."""
    rows = []
    for s in samples:
        assert s.routing is not None and len(s.routing) == len(s.prompt_ids) + len(s.response_ids) - 1
        tokens = np.array([*s.prompt_ids, *s.response_ids], np.int64)
        ones = np.ones(len(s.response_ids), np.float32)
        layers = [layer for layer in range(arch.num_layers) if arch.layer_is_moe(layer)]
        routing = replayable(s.routing, layers, arch.num_experts)
        fields = {"rollout_log_probs": np.array(s.log_probs, np.float32)}
        rows.append(TrainSample(tokens, len(s.prompt_ids), ones, fields, routing))
    return collate(rows, ["rollout_log_probs"])


def differences(log_probs: Tensor, batch: MicroBatch) -> dict[str, float]:
    mask = batch.loss_mask > 0
    d = (log_probs - batch.fields["rollout_log_probs"])[mask].double()
    return {
        "mean_abs_diff": float(d.abs().mean()),
        "p99_abs_diff": float(d.abs().quantile(0.99)),
        "max_abs_diff": float(d.abs().max()),
        "kl": float((d.exp() - 1 - d).mean()),
    }


def sent_elsewhere(recorded: dict[int, Tensor], batch: MicroBatch) -> float:
    """Share of (token, layer) pairs whose recorded experts are not the engine's."""
    assert isinstance(batch.routing, Tensor)
    differ, known = 0, 0
    for layer, chosen in recorded.items():
        told = batch.routing[:, :, layer].transpose(0, 1).reshape(chosen.shape)
        count = told[:, 0] >= 0
        differ += int((told[count].sort(1).values != chosen[count].sort(1).values).any(1).sum())
        known += int(count.sum())
    return differ / known


def measure(
    model: Path, dtype: str, prompts: int, samples_per_prompt: int, response_len: int, drafts: bool
) -> dict[str, Any]:
    """All numbers, by name. Needs the environment of one torchrun rank."""
    from rhymemeg.parallel.runtime import init_runtime

    config = options(model, dtype, response_len)
    arch = ModelArch.from_pretrained(model)
    runtime = init_runtime(config.run, config.parallel, seed=1)
    from rhymemeg.parallel.actor import Actor
    from rhymemeg.rollout.engine import RolloutEngine

    drafting = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = RolloutEngine.start(config, arch, runtime, speculative=drafting if drafts else None)
    samples = sample(engine, prompts, samples_per_prompt, response_len)
    batch = batch_of(samples, arch)
    actor = Actor(config, arch, runtime)
    actor.load_weights(model)
    own = actor.log_probs([replace(batch, routing=None)], 1.0)[0]
    own_elsewhere = sent_elsewhere(actor.recorded[0], batch)
    replayed = actor.log_probs([batch], 1.0)[0]
    return {
        "dtype": dtype,
        "tokens": int(batch.loss_mask.sum()),
        "own routing": differences(own, batch) | {"sent_elsewhere": own_elsewhere},
        "replayed": differences(replayed, batch) | {"sent_elsewhere": sent_elsewhere(actor.recorded[0], batch)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples-per-prompt", type=int, default=4)
    parser.add_argument("--response-len", type=int, default=96)
    parser.add_argument("--drafts", action="store_true", help="the engine drafts from the response so far")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.seed)
        found = measure(Path(folder), args.dtype, args.prompts, args.samples_per_prompt, args.response_len, args.drafts)
    print(f"{found['tokens']} response tokens, {found['dtype']}, {LAYERS} layers, {K} of {EXPERTS} experts")
    print(f"{'':14}{'mean |d|':>10}{'p99 |d|':>10}{'max |d|':>10}{'KL':>11}{'elsewhere':>11}")
    for name in ("own routing", "replayed"):
        v = found[name]
        print(
            f"{name:14}{v['mean_abs_diff']:10.2e}{v['p99_abs_diff']:10.2e}{v['max_abs_diff']:10.2e}{v['kl']:11.2e}"
            f"{v['sent_elsewhere']:10.2%}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
