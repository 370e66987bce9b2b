"""What is measured: probes, each a fixed piece of work of this package, timed by itself.

A probe belongs to a *group* that shares a process:

    quick    drafter, planner, sync plan, batching: no engine, no torch, less than a second a repeat
    model    a vLLM engine without and one with drafts, a weight update, a training step, on a small model in one process
    step     whole steps of the trainer under torchrun, two ranks; its phases are measures

`prepare` does what is not to be timed and returns a function that does the work once and returns the time of each of its
measures, in seconds of its own clock. The work is the same at every repeat: seeds are fixed, responses and drafts are those
that the seeds give. Workers (`rhymemeg.perf.worker`) run it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Work = Callable[[], dict[str, float]]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Context:
    """What a probe may use. `model`: folder of the small model. `clock`: CPU time of the process on a CPU, where other
    work on the machine would disturb wall time; wall time on a GPU. `shared`: what probes of one process share."""

    model: str
    clock: Clock
    clock_name: str
    shared: dict[str, Any]


@dataclass(frozen=True)
class Probe:
    """`measures`: name -> phase."""

    name: str
    group: str
    measures: dict[str, str]
    prepare: Callable[[Context], Work]


def machine_speed(clock: Clock) -> float:
    """Seconds of a fixed piece of work of no interest: an interpreter's loop, a sort, and reads all over 32 MiB."""
    generator = np.random.default_rng(0)
    table = _TABLE.setdefault("table", generator.integers(0, 1 << 22, 1 << 22))
    order = _TABLE.setdefault("order", generator.integers(0, 1 << 22, 100_000))
    keys = _TABLE.setdefault("keys", generator.random(60_000))
    begin = clock()
    total = 0
    for i in range(60_000):
        total += i & 7
    np.sort(keys)
    int(table[order].sum())
    return clock() - begin


_TABLE: dict[str, Any] = {}


# ---------------------------------------------------------------------------------------------------------------- quick


def _drafter(context: Context) -> Work:
    """The draft index: history of 8 prompts loaded, 128 live requests fed and drafted for."""
    from rhymemeg.histospec.bench import GROUP, STEP, Ours, group

    prompts, requests, steps, length = 8, 128, 96, 1024
    histories = [group(prompt, length) for prompt in range(prompts)]
    live = [group(prompt, length, GROUP + requests // prompts) for prompt in range(prompts)]
    tokens = [
        [live[i % prompts][GROUP + i // prompts][step * STEP : (step + 1) * STEP] for i in range(requests)]
        for step in range(steps)
    ]

    def work() -> dict[str, float]:
        index = Ours()
        begin = context.clock()
        for prompt, history in enumerate(histories):
            index.load(prompt, history)
        load = context.clock() - begin
        index.open(requests, prompts)
        append = draft = 0.0
        for new in tokens:
            formed = index.form(new)
            t0 = context.clock()
            index.append(formed)
            t1 = context.clock()
            index.draft()
            append, draft = append + t1 - t0, draft + context.clock() - t1
        return {"drafter.load": load, "drafter.append": append, "drafter.draft": draft}

    return work


def _planner(context: Context) -> Work:
    """A window's plan: 2,048 prompts x 16 samples on 128 engines, from one epoch's lengths."""
    from rhymemeg.histopipe.plan import PlanRequest
    from rhymemeg.histopipe.planner import plan

    generator = np.random.default_rng(0)
    prompts, times = 2048, 6
    base = generator.lognormal(7, 0.8, (prompts, 1))
    history = np.clip(np.rint(base * generator.lognormal(0, 0.5, (prompts, 16))), 1, 16384)
    request = PlanRequest(
        step=0,
        num_engines=128,
        slots=64,
        samples_per_prompt=16,
        prompt_ids=np.arange(prompts),
        history=history,
        max_response_len=16384,
        carry_share=0.1,
    )

    def work() -> dict[str, float]:
        begin = context.clock()
        for _ in range(times):
            plan(request)
        return {"planner.plan": (context.clock() - begin) / times}

    return work


def _sync_plan(context: Context) -> Work:
    """The plan of a weight update: a dense model of 36 layers, 16 ranks, actor TP 4 PP 2, engines TP 2."""
    from rhymemeg.arch import ModelArch
    from rhymemeg.config import ParallelOptions
    from rhymemeg.parallel.layout_checks import describe_layout
    from rhymemeg.weight_sync.layouts import ModelLayout
    from rhymemeg.weight_sync.moves import EngineTarget
    from rhymemeg.weight_sync.planner import make_plan
    from rhymemeg.weight_sync.topology import ActorLayout, EngineLayout

    arch = ModelArch.from_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12_288,
            "max_position_embeddings": 40_960,
        }
    )
    parallel = ParallelOptions(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, sequence_parallel=True)
    ranks = 16
    actor = ActorLayout.planned(describe_layout(arch, parallel, ranks), arch.padded_vocab_size(128, 4))
    engines = EngineTarget(EngineLayout(ranks, 2, False), 0)

    def work() -> dict[str, float]:
        begin = context.clock()
        for _ in range(2):
            make_plan(ModelLayout(arch), actor, engines, 2, 512 << 20, 8).program(3)
        return {"sync.plan": (context.clock() - begin) / 2}

    return work


def _batching(context: Context) -> Work:
    """Micro-batches of 8,192 samples for 64 data-parallel ranks."""
    from rhymemeg.rl.batching import plan_micro_batches

    lengths = np.random.default_rng(0).lognormal(7, 0.8, 8192).astype(int).clip(1, 16384).tolist()

    def work() -> dict[str, float]:
        begin = context.clock()
        for _ in range(2):
            plan_micro_batches(lengths, 64, 32768, 4096)
        return {"batching.plan": (context.clock() - begin) / 2}

    return work


# ---------------------------------------------------------------------------------------------------------------- model


def _model(context: Context) -> dict[str, Any]:
    """What the probes of the model group share: process groups, prompts, sampling."""
    if "config" not in context.shared:
        from rhymemeg.arch import ModelArch
        from rhymemeg.config import Config, DataOptions, EngineOptions, ModelOptions, RolloutOptions
        from rhymemeg.data.prompts import load_prompts
        from rhymemeg.data.tokenizer import load_tokenizer
        from rhymemeg.parallel.runtime import init_runtime
        from rhymemeg.rollout.spec import SamplingOptions

        config = Config(
            model=ModelOptions(hf_checkpoint=context.model),
            data=DataOptions(prompt_data="task:ledger", num_prompts=8),
            rollout=RolloutOptions(max_prompt_len=192, max_response_len=192, n_samples_per_prompt=4),
            engine=EngineOptions(vllm_max_num_seqs=32, vllm_kv_cache_memory_gib=0.25, vllm_enable_sleep_mode=False),
        )
        tokenizer = load_tokenizer(context.model)
        prompts = load_prompts(config.data, tokenizer, max_prompt_len=192)
        context.shared.update(
            config=config,
            arch=ModelArch.from_pretrained(context.model),
            runtime=init_runtime(config.run, config.parallel, config.run.seed),
            prompts=[prompts[i] for i in range(len(prompts))],
            sampling=SamplingOptions(temperature=1.0, max_response_len=192),
        )
    return context.shared


def _generate(shared: dict[str, Any], engine: Any, step: int) -> list[Any]:
    """All samples of all prompts, as many at once as the engine takes. The seeds depend on nothing but the sample."""
    from rhymemeg.rollout.samples import Sample, SampleId
    from rhymemeg.rollout.window import run_samples

    samples = [Sample(SampleId(step, p.prompt_id, k), p.token_ids) for p in shared["prompts"] for k in range(4)]
    return run_samples(engine, samples, shared["sampling"], 1234, timeout=600)


def _plain_rollout(context: Context) -> Work:
    """8 prompts x 4 samples without drafts."""
    from rhymemeg.rollout.engine import RolloutEngine

    shared = _model(context)
    engine = shared["engine"] = RolloutEngine.start(shared["config"], shared["arch"], shared["runtime"])
    context.shared.setdefault("close", []).append(engine.close)

    def work() -> dict[str, float]:
        begin = context.clock()
        samples = _generate(shared, engine, 1)
        tokens = sum(len(s.response_ids) for s in samples)
        return {"rollout.plain": (context.clock() - begin) / tokens}

    return work


def _drafted_rollout(context: Context) -> Work:
    """The same responses, with drafts of up to 8 tokens from other responses to the same prompts. The length is fixed, so
    that the work does not depend on the times that a policy would learn from."""
    from rhymemeg.histospec.cost_model import CostModel
    from rhymemeg.histospec.drafter import Drafter, DrafterOptions
    from rhymemeg.histospec.history import HistoryBuffer
    from rhymemeg.histospec.proposer import WORKER_EXTENSION, attach, speculative_config
    from rhymemeg.rollout.engine import RolloutEngine

    shared = _model(context)
    engine = RolloutEngine.start(
        shared["config"],
        shared["arch"],
        shared["runtime"],
        speculative=speculative_config(8, 32),
        worker_extension=WORKER_EXTENSION,
    )
    context.shared.setdefault("close", []).append(engine.close)
    history = HistoryBuffer(shared["arch"].vocab_size)
    past: dict[int, list[list[int]]] = {}
    for sample in _generate(shared, engine, 0):
        past.setdefault(sample.sample_id.prompt_id, []).append(sample.response_ids)
    tokens_of = {p.prompt_id: p.token_ids for p in shared["prompts"]}
    for prompt_id, responses in past.items():
        history.record(prompt_id, tokens_of[prompt_id], responses, [1.0] * len(responses), step=0)

    def work() -> dict[str, float]:
        drafter = Drafter(DrafterOptions(policy="fixed:8", max_draft=8), history, CostModel.built_in("cpu"))
        attach(engine.vllm.model_runner, drafter)
        begin = context.clock()
        drafter.load(tokens_of)
        samples = _generate(shared, engine, 1)
        seconds = context.clock() - begin
        drafter.release()
        attach(engine.vllm.model_runner, None)
        return {"rollout.drafted": seconds / sum(len(s.response_ids) for s in samples)}

    return work


def _actor(context: Context) -> Any:
    shared = _model(context)
    if "actor" not in shared:
        from rhymemeg.parallel.actor import Actor

        shared["config"].optimizer.lr = 1e-12  # the weights stay what they are
        shared["actor"] = Actor(shared["config"], shared["arch"], shared["runtime"])
        shared["actor"].load_weights(context.model)
    return shared["actor"]


def _train(context: Context) -> Work:
    """One optimizer step on 32 samples of 64 to 256 tokens."""
    from rhymemeg.rl.batching import TrainSample, collate, plan_micro_batches
    from rhymemeg.rl.objective import Objective

    shared = _model(context)
    actor = _actor(context)
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(32):
        tokens = generator.integers(2, shared["arch"].vocab_size, int(generator.integers(64, 257)))
        response = len(tokens) - 32
        fields = {
            "advantages": np.full(response, generator.normal(), np.float32),
            "weights": np.full(response, 1e-4, np.float32),
            "rollout_log_probs": np.full(response, -1.0, np.float32),
        }
        rows.append(TrainSample(tokens.astype(np.int64), 32, np.ones(response, np.float32), fields))
    plan = plan_micro_batches([len(row.tokens) for row in rows], 1, 4096, shared["arch"].hidden_size)[0]
    names = ["advantages", "weights", "rollout_log_probs"]
    batches = [collate([rows[i] for i in batch], names, shared["runtime"].device) for batch in plan]
    trained = sum(len(row.tokens) - 32 for row in rows)

    def work() -> dict[str, float]:
        begin = context.clock()
        actor.train_step(batches, Objective(shared["config"].algorithm, trained), 1.0)
        return {"train.step": context.clock() - begin}

    return work


def _push(context: Context) -> Work:
    """The actor's weights into the engine without drafts."""
    from rhymemeg.weight_sync.push import WeightSync

    shared = _model(context)
    sync = WeightSync(
        shared["arch"], shared["config"].sync, shared["runtime"], _actor(context).chunks, shared["engine"]
    )
    version = 0

    def work() -> dict[str, float]:
        nonlocal version
        version += 1
        begin = context.clock()
        sync.push(version)
        return {"sync.push": context.clock() - begin}

    return work


PROBES = [
    Probe("drafter", "quick", {f"drafter.{n}": "drafter" for n in ("load", "append", "draft")}, _drafter),
    Probe("planner", "quick", {"planner.plan": "planner"}, _planner),
    Probe("sync_plan", "quick", {"sync.plan": "sync plan"}, _sync_plan),
    Probe("batching", "quick", {"batching.plan": "batching"}, _batching),
    Probe("rollout", "model", {"rollout.plain": "rollout"}, _plain_rollout),
    Probe("rollout_drafted", "model", {"rollout.drafted": "rollout"}, _drafted_rollout),
    Probe("train", "model", {"train.step": "train"}, _train),
    Probe("sync", "model", {"sync.push": "sync"}, _push),
]
STEP = "step"
"""Name and group of the whole step, which is no probe of one process."""
NEEDS = {"sync": ("rollout",)}
"""Probes that use what another one prepares."""


def names() -> list[str]:
    """Everything that can be asked for."""
    return [*dict.fromkeys(p.group for p in PROBES), STEP, *(p.name for p in PROBES), "all"]


def choose(words: list[str]) -> dict[str, list[str]]:
    """Probes to run, by group: {"quick": [...], "model": [...], "step": ["step"]}. ValueError names an unknown word."""
    from rhymemeg.config import did_you_mean

    chosen: dict[str, list[str]] = {}
    for word in words:
        if word not in names():
            raise ValueError(f"unknown probe or group {word!r}{did_you_mean(word, names())}")
    for probe in PROBES:
        wanted = {probe.name, probe.group, "all"} & set(words)
        wanted |= {word for word in words if probe.name in NEEDS.get(word, ())}
        if wanted:
            chosen.setdefault(probe.group, []).append(probe.name)
    if {STEP, "all"} & set(words):
        chosen[STEP] = [STEP]
    return chosen


def context_for(model: str) -> Context:
    """CPU time where there is no GPU. For the quick group that is always so."""
    return Context(model, time.process_time, "cpu", {})


def device_context(model: str) -> Context:
    """For the model group: wall time with a GPU, after its queue is empty."""
    import torch

    if not torch.cuda.is_available():
        return context_for(model)

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return Context(model, clock, "wall", {})


# ----------------------------------------------------------------------------------------------------------------- step


def step_command(ranks: int, steps: int, output_dir: Path) -> list[str]:
    """torchrun of the quickstart's configuration, smaller and without what is not a step."""
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--module",
        "rhymemeg.train",
    ]
    words += ["--config", "launch/configs/quickstart.yaml", "--display", "off", "--tensorboard", "False"]
    words += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--num-prompts", "64", "--eval-interval", "0"]
    words += ["--save-interval", "0", "--save-final", "False", "--export-hf", "False", "--save-samples-interval", "0"]
    return [*words, "--train-iters", str(steps), "--output-dir", str(output_dir)]


def step_measures(folder: Path, skip: int) -> dict[str, tuple[str, list[float]]]:
    """{measure: (phase, seconds for a unit of work, a value a step)} of phases that take a thousandth of the step."""
    from rhymemeg.observe.read_run import read_run
    from rhymemeg.perf.runs import phase_times

    phases = phase_times(read_run(folder), skip)
    whole = next(p.mean_seconds for p in phases if p.name == "step")
    return {
        f"step.{p.name}" if p.name != "step" else "step.whole": (p.name, p.seconds.tolist())
        for p in phases
        if p.mean_seconds >= 1e-3 * whole and p.name != "other" and math.isfinite(p.mean_seconds)
    }
