"""Draws from a real engine that drafts from history, against exact probabilities; prints one JSON line.

    python -m tests.histospec.check_exactness FOLDER

One engine of a random model with few tokens. For each kind of sampling, thousands of requests of one prompt are drafted
for from its history; how often each sequence of the first `LENGTH` tokens occurs is compared with its probability, which
transformers computes, by a chi-squared test. Then the replacements of `rollout.plugin` are taken out again and the same
is done once more, which must fail.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.proposer import WORKER_EXTENSION, attach, speculative_config
from rhymemeg.rollout import vllm_compat
from rhymemeg.rollout.engine import RolloutEngine
from rhymemeg.rollout.samples import Sample, SampleId, sample_seed
from rhymemeg.rollout.spec import SamplingOptions
from tests.rollout import tiny
from tests.rollout.check_plugin import chi_squared_p_value

VOCAB, LENGTH, RESPONSE, MAX_DRAFT = 8, 3, 7, 4
PROMPT = (3, 5, 2, 6)
PROMPTS = {7: PROMPT, 8: PROMPT}  # equal texts, two prompts
DRAWS = 4000


def make_model(folder: Path) -> Any:
    """A random Qwen3 of `VOCAB` tokens, saved, and as transformers has it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=0, bos_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def exact(model: Any, sampling: SamplingOptions) -> Tensor:
    """[VOCAB] * LENGTH log-probabilities of the first tokens."""
    total = torch.zeros(())
    for depth in range(LENGTH):
        prefixes = torch.tensor([PROMPT + more for more in itertools.product(range(VOCAB), repeat=depth)])
        logits = model(prefixes).logits[:, -1].double() / sampling.temperature
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
        if sampling.top_p < 1:
            p, order = logits.softmax(-1).sort(descending=True)
            left_out = p.cumsum(-1) - p >= sampling.top_p
            logits[left_out.gather(1, order.argsort(-1))] = -torch.inf
        total = total.unsqueeze(-1) + logits.log_softmax(-1).view([VOCAB] * (depth + 1))
    return total


def p_value(samples: list[Sample], log_p: Tensor) -> float:
    """Of the first tokens of the samples; outcomes expected less than 5 times are taken together."""
    p = log_p.exp().flatten()
    counts = torch.zeros(len(p), dtype=torch.float64)
    for sample in samples:
        place = 0
        for token in sample.response_ids[:LENGTH]:
            place = place * VOCAB + token
        counts[place] += 1
    if bool((counts[p == 0] > 0).any()):
        return 0.0
    rare = p * len(samples) < 5
    pooled = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, p)]
    return chi_squared_p_value(*pooled)


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    vllm_compat.prepare_environment("cpu")
    import vllm.v1.sample.rejection_sampler as rejection
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils as kernels

    model = make_model(folder)
    names = ("expand", "rejection_random_sample", "sample_recovered_tokens")
    originals = {name: getattr(kernels, f"_{name}_kernel_impl") for name in names}
    forward = rejection.RejectionSampler.forward
    spec = tiny.spec(
        folder, ModelArch.from_pretrained(str(folder)), stop_token_ids=(), max_num_seqs=128,
        speculative=speculative_config(MAX_DRAFT, 128), worker_extension=WORKER_EXTENSION,
    )  # fmt: skip
    engine = RolloutEngine(replace(spec, max_response_len=64, kv_cache_memory=64 << 20), tiny.one_rank())
    runner = engine.vllm.model_runner
    assert rejection.RejectionSampler.forward is not forward
    step = 0

    def run(prompts: Mapping[int, tuple[int, ...]], n: int, sampling: SamplingOptions) -> list[Sample]:
        nonlocal step
        step += 1
        todo = [Sample(SampleId(step, p, i), ids) for p, ids in prompts.items() for i in range(n)]
        for sample in todo:
            engine.add(sample, sampling, sample_seed(0, sample.sample_id))
        while engine.has_unfinished():
            engine.step()
        return todo

    def drafter(history: HistoryBuffer, policy: str) -> Drafter:
        # With a clock that stands, goodput decides by the built-in figures, whatever else the machine does.
        options = DrafterOptions(policy=policy, max_draft=MAX_DRAFT)
        made = Drafter(options, history, CostModel.built_in("cpu"), clock=lambda: 0.0)
        attach(runner, made)
        return made

    figures: dict[str, float] = {}

    # Temperature 0: every request as transformers decodes it; history from sampling, so that drafts are right and wrong.
    greedy = SamplingOptions(temperature=0.0, max_response_len=48)
    prompts = {1: (3, 5, 2, 6), 2: (1, 1, 4), 3: (7, 2), 4: (6, 5, 4, 3, 2, 1)}
    past = run(prompts, 4, SamplingOptions(max_response_len=48))
    history = HistoryBuffer(VOCAB)
    for prompt, ids in prompts.items():
        group = [s.response_ids for s in past if s.sample_id.prompt_id == prompt]
        history.record(prompt, ids, group, [1.0] * len(group), step=0)
    wrong = 0
    expected = {
        prompt: model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False, eos_token_id=None)[
            0, len(ids) :
        ]
        for prompt, ids in prompts.items()
    }
    for policy in ("goodput", "fixed:4"):
        made = drafter(history, policy)
        for sample in run(prompts, 4, greedy):
            wrong += sample.response_ids != expected[sample.sample_id.prompt_id].tolist()
        figures[f"greedy_accepted_{policy}"] = made.take_metrics()["histospec/accepted"]
    figures["greedy_wrong"] = wrong

    # Temperature above 0: the distribution.
    kinds = {
        "temperature 1": SamplingOptions(max_response_len=RESPONSE),
        "temperature 0.7, top-p 0.8": SamplingOptions(temperature=0.7, top_p=0.8, max_response_len=RESPONSE),
        "top-k 3": SamplingOptions(top_k=3, max_response_len=RESPONSE),
    }
    past = run(PROMPTS, 8, kinds["temperature 1"])
    history = HistoryBuffer(VOCAB)
    for prompt in PROMPTS:
        group = [s.response_ids for s in past if s.sample_id.prompt_id == prompt]
        history.record(prompt, PROMPT, group, [1.0] * len(group), step=0)
    tables = {name: exact(model, sampling) for name, sampling in kinds.items()}

    def measure(label: str, name: str) -> None:
        """Draw, and put figures about it under names that begin with `label`."""
        made = drafter(history, "fixed:4")
        samples = run(PROMPTS, DRAWS // 2, kinds[name])
        metrics = made.take_metrics()
        made.release()
        figures[f"{label} p_value, {name}"] = p_value(samples, tables[name])
        figures[f"{label} accepted, {name}"] = metrics["histospec/accepted"]
        figures[f"{label} refused, {name}"] = metrics["histospec/drafted"] - metrics["histospec/accepted"]
        given = torch.tensor([sum(s.log_probs[:LENGTH]) for s in samples]).double()
        true = torch.stack([tables[name][tuple(s.response_ids[:LENGTH])] for s in samples])
        figures[f"{label} log_prob_error, {name}"] = float((given - true).abs().max())
        # No two requests have the same seed; with a shared one, this would be far too high.
        figures[f"{label} most_frequent, {name}"] = (
            max(Counter(tuple(s.response_ids) for s in samples).values()) / DRAWS
        )

    for name in kinds:
        measure("exact:", name)
    # What the test is able to see: a distribution at a temperature of 0.9 instead of 1.
    draws = run(PROMPTS, DRAWS // 2, replace(kinds["temperature 1"], temperature=0.9))
    figures["other temperature: p_value"] = p_value(draws, tables["temperature 1"])
    # The kernels alone, which other kinds of requests are verified by.
    rejection.RejectionSampler.forward = forward
    measure("kernels:", "temperature 0.7, top-p 0.8")

    # Without the replacements: a drafter attached before, and refused after they are gone.
    made = drafter(history, "fixed:4")
    module = "vllm.v1.sample.rejection_sampler."
    dispatcher.register_kernels({f"{module}{name}_kernel": originals[name] for name in names})
    try:
        attach(runner, made)
        figures["attach_refuses"] = 0
    except ConfigError as error:
        figures["attach_refuses"] = float("vllm.general_plugins" in str(error))
    figures["without: p_value"] = 0.0  # should the process die
    print(json.dumps(figures), flush=True)
    try:
        samples = run(PROMPTS, DRAWS // 2, kinds["temperature 1"])
        figures["without: p_value"] = p_value(samples, tables["temperature 1"])
    except Exception as error:  # log-probabilities that are not finite, most likely
        figures["without: p_value"] = 0.0
        print(f"without replacements: {error}", file=sys.stderr)
    figures["without: drafted"] = made.take_metrics()["histospec/drafted"]
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
