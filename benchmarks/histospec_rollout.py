"""Wall time of whole rollouts with and without HistoSpec, on real engines.

    OMP_NUM_THREADS=1 python -m benchmarks.histospec_rollout --model launch/quickstart_model

Workload: all samples of a prompt set of the ledger task at temperature 1, through one engine with continuous batching: a
request that ends is replaced by the next one, so `--batches` requests run at a time until the queue is empty. History is
one earlier epoch: responses to the same prompts, sampled beforehand from `--history-model` (default: the same weights, that
is, an epoch in which training changed nothing; give the weights of an epoch earlier for the real distance).

Arms, which take turns in each repeat, all with the same request seeds:

    plain       an engine that was started without speculative decoding
    off         an engine started for HistoSpec, with nothing attached
    POLICY      HistoSpec: history and live siblings (goodput, paper, published, fixed:K; `--policies`)
    history     the first policy without siblings
    control     the first policy, history shifted by one prompt, no siblings: nothing to gain, and nothing may be lost
    suffix      vLLM's own suffix method (arctic-inference; skipped where it is not installed), its cache emptied before every
                run and given the same history, which is not timed; HistoSpec's loading of its history is

Drafters keep what they learn (acceptance, step times) from repeat to repeat, as they do from step to step in training;
the first repeat starts from nothing. Sampled responses differ in length between arms and repeats, so the speed-up is the
ratio of tokens per second, median over repeats of (arm / plain of the same repeat): `wall` from elapsed time, `cpu` from the
CPU time of this process, which other work on the machine disturbs less. `steps` is engine steps per token over those of
plain; `tokens` is tokens per request-step, steps that end a prefill not counted.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rhymemeg.histospec.drafter import Drafter
    from rhymemeg.rollout.engine import RolloutEngine
    from rhymemeg.rollout.samples import Prompt, Sample
    from rhymemeg.rollout.spec import EngineSpec, SamplingOptions

MAX_DRAFT = 16
MAX_RESPONSE = 448


@dataclass
class Alone:
    """This process as the only rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device_type: str = "cpu"


@dataclass
class Run:
    """One rollout of the whole queue. Seconds, counts."""

    wall: float
    cpu: float
    tokens: int
    engine_steps: int
    requests: int
    emissions: int  # steps of a request that gave it tokens, the end of its prefill included
    metrics: dict[str, float]

    @property
    def tokens_per_request_step(self) -> float:
        return (self.tokens - self.requests) / (self.emissions - self.requests)


Responses = dict[int, list[list[int]]]


# ------------------------------------------------------------------------------------------------------------- rollout


def queue_of(prompts: Sequence[Prompt], samples: int, step: int) -> list[Sample]:
    """All samples, a group after the other, as a run queues them."""
    from rhymemeg.rollout.samples import Sample, SampleId

    return [Sample(SampleId(step, p.prompt_id, i), p.token_ids) for p in prompts for i in range(samples)]


def rollout(
    engine: RolloutEngine, queue: Sequence[Sample], sampling: SamplingOptions, seed: int, running: int,
    prepare: Callable[[], Any] = lambda: None,
) -> Run:  # fmt: skip
    """Sample the queue with `running` requests at a time. `prepare` is part of the timed run."""
    from rhymemeg.rollout.samples import sample_seed

    waiting = list(reversed(queue))
    emissions = steps = tokens = active = 0
    vllm_step = engine.vllm.step

    def counted() -> Any:
        nonlocal emissions
        outputs = vllm_step()
        emissions += sum(bool(out.token_ids) for out in outputs)
        return outputs

    engine.vllm.step = counted  # type: ignore[method-assign]
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        prepare()
        while waiting or active:
            while waiting and active < running:
                sample = waiting.pop()
                engine.add(sample, sampling, sample_seed(seed, sample.sample_id))
                active += 1
            output = engine.step()
            steps += 1
            tokens += output.tokens
            active -= len(output.finished)
    finally:
        engine.vllm.step = vllm_step  # type: ignore[method-assign]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Run(wall, cpu, tokens, steps, len(queue), emissions, {})


# ---------------------------------------------------------------------------------------------------------------- arms


class Arm:
    """A way to sample the queue; see the module."""

    def __init__(self, name: str, engine: RolloutEngine) -> None:
        self.name, self.engine = name, engine

    def run(self, queue: Sequence[Sample], sampling: SamplingOptions, seed: int, running: int) -> Run:
        return rollout(self.engine, queue, sampling, seed, running)


class HistoSpecArm(Arm):
    """`history`: responses by prompt id."""

    def __init__(
        self, name: str, engine: RolloutEngine, prompts: Sequence[Prompt], history: Responses, policy: str,
        siblings: bool, profile: str,
    ) -> None:  # fmt: skip
        super().__init__(name, engine)
        from rhymemeg.histospec.cost_model import CostModel
        from rhymemeg.histospec.drafter import Drafter, DrafterOptions, step_clock
        from rhymemeg.histospec.history import HistoryBuffer

        self.prompts = {p.prompt_id: p.token_ids for p in prompts}
        buffer = HistoryBuffer(engine.spec.arch.vocab_size)
        for p in prompts:
            responses = history[p.prompt_id]
            buffer.record(p.prompt_id, p.token_ids, responses, [1.0] * len(responses), step=0)
        cost = CostModel.load(profile) if profile else CostModel.built_in("cpu")
        self.drafter: Drafter = Drafter(
            DrafterOptions(policy=policy, max_draft=MAX_DRAFT, siblings=siblings), buffer, cost, clock=step_clock("cpu")
        )

    def run(self, queue: Sequence[Sample], sampling: SamplingOptions, seed: int, running: int) -> Run:
        from rhymemeg.histospec.proposer import attach

        attach(self.engine.vllm.model_runner, self.drafter)
        run = rollout(self.engine, queue, sampling, seed, running, lambda: self.drafter.load(self.prompts))
        run.metrics = self.drafter.take_metrics()
        self.drafter.release()
        attach(self.engine.vllm.model_runner, None)
        return run


class SuffixArm(Arm):
    """vLLM's suffix decoding with its settings as they come."""

    def __init__(self, name: str, engine: RolloutEngine, prompts: Sequence[Prompt], history: Responses) -> None:
        super().__init__(name, engine)
        self.prompts, self.history = prompts, history

    def run(self, queue: Sequence[Sample], sampling: SamplingOptions, seed: int, running: int) -> Run:
        import numpy as np
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        proposer = self.engine.vllm.model_runner.drafter
        old = proposer.suffix_cache
        cache = SuffixDecodingCache(max_tree_depth=old.max_tree_depth, max_cached_requests=old.max_cached_requests)
        for p in self.prompts:
            for i, response in enumerate(self.history[p.prompt_id]):
                name = f"history-{p.prompt_id}-{i}"
                cache.start_request(name, np.asarray(p.token_ids, np.int32))
                cache.add_active_response(name, response)
                cache.stop_request(name)
        proposer.suffix_cache = cache
        return super().run(queue, sampling, seed, running)


def has_suffix(path: str) -> bool:
    """Whether vLLM's suffix method can run; says so if not. `path` is put on the import path first."""
    if path:
        sys.path.insert(0, path)
    if importlib.util.find_spec("arctic_inference") is None:
        print("suffix: skipped, arctic-inference is not installed (see --arctic)", file=sys.stderr)
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------- bench


def start_engine(spec: EngineSpec) -> RolloutEngine:
    """An engine of this process alone."""
    from rhymemeg.rollout.engine import RolloutEngine

    return RolloutEngine(spec, Alone(device_type=spec.device_type))


def set_up(model: str, num_prompts: int, running: int, kv_cache_gib: float) -> tuple[list[Prompt], Any, EngineSpec]:
    """Prompts of the ledger task, tokenizer, and the spec of an engine without speculation; torch.distributed runs."""
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from rhymemeg.arch import ModelArch
    from rhymemeg.config import Config, DataOptions, EngineOptions, ModelOptions, RolloutOptions
    from rhymemeg.data.prompts import load_prompts
    from rhymemeg.rollout.spec import EngineSpec

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = DataOptions(prompt_data="task:ledger", num_prompts=num_prompts)
    config = Config(
        model=ModelOptions(hf_checkpoint=model),
        rollout=RolloutOptions(max_prompt_len=192, max_response_len=MAX_RESPONSE),
        engine=EngineOptions(vllm_max_num_seqs=running, vllm_kv_cache_memory_gib=kv_cache_gib),
    )
    spec = EngineSpec.from_config(config, ModelArch.from_pretrained(model), "cpu")
    return list(load_prompts(data, tokenizer, max_prompt_len=192)), tokenizer, spec


def load_weights(engine: RolloutEngine, folder: str, version: int) -> None:
    """Weights of a Hugging Face folder of one file."""
    from safetensors.torch import load_file

    engine.load_weights(load_file(os.path.join(folder, "model.safetensors")).items(), version)


def summarise(plain: Sequence[Run], runs: Sequence[Run]) -> dict[str, float]:
    """Medians over repeats; ratios are of the same repeat."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    pairs = list(zip(plain, runs))
    return {
        "wall_s": median([r.wall for r in runs]),
        "tokens": median([r.tokens for r in runs]),
        "tokens_per_s": median([r.tokens / r.wall for r in runs]),
        "speedup_wall": median([(r.tokens / r.wall) / (p.tokens / p.wall) for p, r in pairs]),
        "speedup_cpu": median([(r.tokens / r.cpu) / (p.tokens / p.cpu) for p, r in pairs]),
        "engine_steps": median([r.engine_steps for r in runs]),
        "steps_ratio": median([(r.engine_steps / r.tokens) / (p.engine_steps / p.tokens) for p, r in pairs]),
        "tokens_per_request_step": median([r.tokens_per_request_step for r in runs]),
        "acceptance": median([r.metrics.get("histospec/acceptance", float("nan")) for r in runs]),
        "draft_us_per_request": median([r.metrics.get("histospec/draft_us_per_request", float("nan")) for r in runs]),
    }


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run everything; a dictionary a batch size and arm."""
    from rhymemeg.histospec.proposer import WORKER_EXTENSION, speculative_config
    from rhymemeg.rollout.spec import SamplingOptions

    prompts, _, spec = set_up(args.model, args.prompts, max(args.batches), args.kv_cache_memory_gib)
    sampling = SamplingOptions(temperature=args.temperature, max_response_len=MAX_RESPONSE)
    plain = start_engine(spec)
    drafting = speculative_config(MAX_DRAFT, max(args.batches))
    ours = start_engine(replace(spec, speculative=drafting, worker_extension=WORKER_EXTENSION))
    suffix = None
    if "suffix" in args.arms and has_suffix(args.arctic):
        method = {"method": "suffix", "num_speculative_tokens": MAX_DRAFT}
        method["num_speculative_tokens_per_batch_size"] = drafting["num_speculative_tokens_per_batch_size"]
        suffix = start_engine(replace(spec, speculative=method))

    if args.history_model:
        load_weights(plain, args.history_model, 1)
    queue = queue_of(prompts, args.samples, 0)
    rollout(plain, queue, sampling, seed=1, running=max(args.batches))
    history: Responses = {}
    for sample in queue:
        history.setdefault(sample.sample_id.prompt_id, []).append(sample.response_ids)
    if args.history_model:
        load_weights(plain, args.model, 2)
    ids = [p.prompt_id for p in prompts]
    shifted = {a: history[b] for a, b in zip(ids, ids[1:] + ids[:1])}
    for engine in [ours] + ([suffix] if suffix else []):  # lazy set-up
        rollout(engine, queue_of(prompts[:4], args.samples, 0), sampling, seed=2, running=8)

    results = []
    for running in args.batches:
        arms: list[Arm] = [Arm("plain", plain)]
        for name in args.arms:
            if name == "policies":
                arms += [HistoSpecArm(p, ours, prompts, history, p, True, args.profile) for p in args.policies]
            elif name in ("history", "control"):
                past = history if name == "history" else shifted
                arms.append(HistoSpecArm(name, ours, prompts, past, args.policies[0], False, args.profile))
            elif name == "off":
                arms.append(Arm("off", ours))
            elif suffix is not None:
                arms.append(SuffixArm("suffix", suffix, prompts, history))
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        for repeat in range(args.repeats):
            turn = repeat % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                queue = queue_of(prompts, args.samples, repeat + 1)
                runs[arm.name].append(arm.run(queue, sampling, 100 + repeat, running))
        for arm in arms:
            line = {"running": running, "arm": arm.name, **summarise(runs["plain"], runs[arm.name])}
            results.append(line)
            print_line(line, args.json)
        if args.cost_models:
            for arm in arms:
                if isinstance(arm, HistoSpecArm):
                    print_cost(arm, running)
    for engine in [plain, ours] + ([suffix] if suffix else []):
        engine.close()
    return results


def print_line(line: dict[str, Any], as_json: bool) -> None:
    """A line of the table, or of JSON."""
    if as_json:
        print(json.dumps({k: v for k, v in line.items() if v == v}), flush=True)
        return
    if line["arm"] == "plain":
        print(
            f"{'running':>7} {'arm':<10} {'seconds':>8} {'tokens':>7} {'tokens/s':>8} {'wall':>6} {'cpu':>6} {'steps':>6} "
            f"{'tokens':>7} {'accept':>7} {'draft us':>8}"
        )
    print(
        f"{line['running']:>7} {line['arm']:<10} {line['wall_s']:>8.2f} {line['tokens']:>7.0f} "
        f"{line['tokens_per_s']:>8.0f} {line['speedup_wall']:>6.2f} {line['speedup_cpu']:>6.2f} {line['steps_ratio']:>6.3f} "
        f"{line['tokens_per_request_step']:>7.3f} {line['acceptance']:>7.3f} {line['draft_us_per_request']:>8.1f}",
        flush=True,
    )


def print_cost(arm: HistoSpecArm, running: int) -> None:
    """What the arm's cost model has learnt for this batch size: milliseconds by query tokens a request."""
    cost = arm.drafter.cost
    queries = [1, 1.5, 2, 3, 5, 9]
    times = cost.predict(running, [running * q for q in queries])
    print(f"        {arm.name}: ms at " + ", ".join(f"{q:g} q {1000 * t:.1f}" for q, t in zip(queries, times)))


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="launch/quickstart_model", help="Hugging Face folder")
    parser.add_argument(
        "--history-model", default="", help="weights that the history is sampled from; default: --model's"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 64, 256], help="requests running at a time")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--policies", nargs="+", default=["goodput"])
    names = ["off", "policies", "history", "control", "suffix"]
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="besides plain")
    parser.add_argument("--profile", default="", help="step times of rhymemeg.histospec.profile; default: built-in")
    parser.add_argument("--arctic", default="", help="folder in which arctic-inference is installed")
    parser.add_argument("--kv-cache-memory-gib", type=float, default=0.5)
    parser.add_argument("--cost-models", action="store_true", help="print what each arm has learnt about step times")
    parser.add_argument("--json", action="store_true", help="one JSON line an arm instead of the table")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
