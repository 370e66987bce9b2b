"""What the CPU backend of the actor costs a rollout engine in the same process.

    OMP_NUM_THREADS=1 python tools/bench_cpu_backend.py --model launch/quickstart_model

One engine decodes the same requests again and again: without the backend, with it installed, and, for comparison, under
a torch function mode that passes every call on, which is the shortest way to redirect devices. Printed are medians over
the steps in which all requests decode: time that passed, the process's own CPU time (which other work on the machine
disturbs less), and the ratio of the latter to the first condition's. The backend cannot be taken out again, so each of
`--rounds` rounds is a process of its own; the printed numbers are medians over them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def passing_mode() -> Iterator[None]:
    """A function mode that does nothing but be there."""
    from torch.overrides import TorchFunctionMode

    class Pass(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Pass():
        yield


def one_round(model: str, batch_size: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median seconds of a decode step by condition, in this process: that passed, and of CPU time."""
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    from rhymemeg.arch import ModelArch
    from rhymemeg.config import Config, EngineOptions, ModelOptions, RolloutOptions
    from rhymemeg.parallel import cpu_backend
    from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
    from rhymemeg.rollout.samples import Sample, SampleId

    prompt_len, response_len = 32, 64
    config = Config(
        model=ModelOptions(hf_checkpoint=model),
        rollout=RolloutOptions(max_prompt_len=prompt_len, max_response_len=response_len),
        engine=EngineOptions(vllm_max_num_seqs=batch_size, vllm_kv_cache_memory_gib=0.25),
    )
    arch = ModelArch.from_pretrained(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks: Any = SimpleNamespace(rank=0, local_rank=0, world_size=1, device_type="cpu")
    engine = RolloutEngine.start(config, arch, ranks)
    sampling = SamplingOptions(temperature=1.0, max_response_len=response_len)
    generator = torch.Generator().manual_seed(0)
    count = 0

    def decode() -> list[tuple[float, float]]:
        nonlocal count
        count += 1
        for i in range(batch_size):
            prompt = torch.randint(2, arch.vocab_size, (prompt_len,), generator=generator).tolist()
            engine.add(Sample(SampleId(count, i, 0), tuple(prompt)), sampling, seed=i)
        steps = []
        while engine.has_unfinished():
            start, cpu = time.perf_counter(), time.process_time()
            tokens = engine.step().tokens
            if tokens == batch_size:
                steps.append((time.perf_counter() - start, time.process_time() - cpu))
        return steps

    decode()  # lazy set-up
    without = [step for _ in range(repeats) for step in decode()]
    cpu_backend.install()
    with cpu_backend.megatron_calls():
        pass
    installed = [step for _ in range(repeats) for step in decode()]
    with passing_mode():
        mode = [step for _ in range(repeats) for step in decode()]
    engine.close()
    named = {"without": without, "backend": installed, "mode": mode}
    return {
        name: (statistics.median(wall for wall, _ in steps), statistics.median(cpu for _, cpu in steps))
        for name, steps in named.items()
    }


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="times the requests are decoded in each condition")
    parser.add_argument("--rounds", type=int, default=3, help="processes")
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.one_round:
        print("RESULT " + json.dumps(one_round(args.model, args.batch_size, args.repeats)))
        return
    rounds = []
    for _ in range(args.rounds):
        done = subprocess.run([sys.executable, *sys.argv, "--one-round"], capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            raise SystemExit(f"a round failed:\n{done.stderr[-3000:]}")
        rounds.append(json.loads(lines[0].removeprefix("RESULT ")))
    print(
        f"{'condition':<22} {'step ms':>9} {'CPU ms':>9} {'ratio':>7}   (batch {args.batch_size}, {args.rounds} rounds)"
    )
    for name, label in (
        ("without", "without the backend"),
        ("backend", "backend installed"),
        ("mode", "function mode"),
    ):
        wall, cpu = (statistics.median(r[name][i] for r in rounds) for i in (0, 1))
        ratio = statistics.median(r[name][1] / r["without"][1] for r in rounds)
        print(f"{label:<22} {1e3 * wall:>9.2f} {1e3 * cpu:>9.2f} {ratio:>7.3f}")


if __name__ == "__main__":
    main()
