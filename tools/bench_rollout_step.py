"""Time of one decode step of a rollout engine, by batch size.

    OMP_NUM_THREADS=1 python tools/bench_rollout_step.py --model launch/quickstart_model --batch-sizes 1,8,32,64

One process, one engine. For each batch size, requests of random prompts run to a fixed length; printed are the median
and the 90th percentile of a step in which all of them decode, tokens per second at the median, and the share of the
median spent outside vLLM (this package's own Python). `--profile` prints where the time of the last batch size goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, replace


@dataclass
class Alone:
    """This process as the only rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device_type: str = "cpu"


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--batch-sizes", default="1,8,32,64")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--response-len", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--block-size", type=int, help="tokens a KV block; default: the engine's")
    parser.add_argument("--kv-cache-memory-gib", type=float, default=0.5)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON line a batch size instead of the table")
    parser.add_argument("--profile", action="store_true", help="cProfile of the last batch size")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import torch
    import torch.distributed as dist

    from rhymemeg.arch import ModelArch
    from rhymemeg.config import Config, EngineOptions, ModelOptions, RolloutOptions
    from rhymemeg.rollout.engine import EngineSpec, RolloutEngine, SamplingOptions
    from rhymemeg.rollout.samples import Sample, SampleId

    sizes = [int(n) for n in args.batch_sizes.split(",")]
    config = Config(
        model=ModelOptions(hf_checkpoint=args.model),
        rollout=RolloutOptions(max_prompt_len=args.prompt_len, max_response_len=args.response_len),
        engine=EngineOptions(
            vllm_max_num_seqs=max(sizes),
            vllm_kv_cache_memory_gib=args.kv_cache_memory_gib,
            vllm_enable_prefix_caching=not args.no_prefix_caching,
        ),
    )
    arch = ModelArch.from_pretrained(args.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = replace(EngineSpec.from_config(config, arch, device), stop_token_ids=())
    if args.block_size:
        spec = replace(spec, block_size=args.block_size)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    begin = time.perf_counter()
    engine = RolloutEngine(spec, Alone(device_type=device))
    started = time.perf_counter() - begin
    sampling = SamplingOptions(temperature=args.temperature, max_response_len=args.response_len)
    generator = torch.Generator().manual_seed(0)

    inside = 0.0
    vllm_step = engine.vllm.step

    def timed_step():  # type: ignore[no-untyped-def]
        nonlocal inside
        start = time.perf_counter()
        outputs = vllm_step()
        inside += time.perf_counter() - start
        return outputs

    engine.vllm.step = timed_step  # type: ignore[method-assign]

    def run(size: int, step: int) -> tuple[list[float], list[float]]:
        """Seconds of each decode step: in all, and outside vLLM."""
        nonlocal inside
        for i in range(size):
            prompt = torch.randint(2, arch.vocab_size, (args.prompt_len,), generator=generator).tolist()
            engine.add(Sample(SampleId(step, i, 0), tuple(prompt)), sampling, seed=i)
        total, own = [], []
        while engine.has_unfinished():
            inside, start = 0.0, time.perf_counter()
            output = engine.step()
            seconds = time.perf_counter() - start
            if output.tokens == size:
                total.append(seconds)
                own.append(seconds - inside)
        return total, own

    run(max(sizes), 0)  # the first requests of a process pay for lazy set-up
    if not args.json:
        print(f"start {started:.1f} s; {device}, block size {spec.block_size}, torch threads {torch.get_num_threads()}")
        print(f"{'batch':>6} {'p10 ms':>8} {'median ms':>10} {'p90 ms':>8} {'tokens/s':>9} {'ours':>6}")
    for number, size in enumerate(sizes, 1):
        total, own = run(size, number)
        deciles = statistics.quantiles(total, n=10)
        p10, median, p90 = deciles[0], deciles[4], deciles[8]
        share = statistics.median(own) / median
        if args.json:
            print(
                json.dumps(
                    {
                        "batch": size,
                        "p10_s": p10,
                        "median_s": median,
                        "p90_s": p90,
                        "tokens_per_s": size / median,
                        "ours": share,
                    }
                )
            )
        else:
            print(
                f"{size:>6} {p10 * 1e3:>8.2f} {median * 1e3:>10.2f} {p90 * 1e3:>8.2f} {size / median:>9.0f} {share:>6.1%}"
            )
    if args.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(run, sizes[-1], len(sizes) + 1)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
