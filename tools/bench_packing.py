"""Would packing sequences into one row pay on a CPU? One layer of the quickstart's shape, forward and backward.

    OMP_NUM_THREADS=1 python tools/bench_packing.py [--mean 120 --sigma 0.6] [--budget 8192]

Draws response lengths (lognormal, cut at --longest), puts them into micro-batches as the learner does (`plan_micro_batches`:
similar lengths together, padded to the longest), and compares two ways of computing them:

* padded: what the actor does, causal attention over [rows, longest];
* packed: all tokens of a micro-batch in one row without padding, and attention kept within each sequence by a mask
  (block-diagonal and causal), which torch's CPU kernels compute over the whole row, since they have no variable-length one.

Printed are the share of padding and the CPU seconds of the layer's matrices, which only see the number of tokens, and of the
attention. Medians over --repeats; CPU time of this process, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rhymemeg.rl.batching import plan_micro_batches

HIDDEN, HEADS, HEAD_DIM, FFN = 128, 4, 32, 384


def seconds(what: Callable[[], Tensor], repeats: int) -> float:
    """Median CPU time of a forward and backward pass."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        what().sum().backward()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def matrices(tokens: int) -> Callable[[], Tensor]:
    """A layer's linear parts on so many tokens."""
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    width = HEADS * HEAD_DIM
    shapes = [(HIDDEN, 3 * width), (width, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)]
    qkv, out, up, down = (torch.randn(a, b, requires_grad=True) for a, b in shapes)

    def run() -> Tensor:
        mixed = (x @ qkv)[:, :width] @ out
        gate, value = (mixed @ up).chunk(2, 1)
        return (F.silu(gate) * value) @ down

    return run


def attention(rows: int, length: int, mask: Tensor | None) -> Callable[[], Tensor]:
    """Causal attention over rows, or under a mask."""
    q, k, v = (torch.randn(rows, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def block_diagonal(lengths: list[int]) -> Tensor:
    """[S, S]: True where a token may look, itself and earlier ones of its sequence."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (of[:, None] == of[None, :]).tril()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--mean", type=float, default=120, help="median response length")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the logarithm of the length")
    parser.add_argument("--longest", type=int, default=448)
    parser.add_argument("--budget", type=int, default=8192, help="--max-tokens-per-microbatch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    responses = np.clip(random.lognormal(np.log(args.mean), args.sigma, args.samples), 1, args.longest).astype(int)
    lengths = [args.prompt_len + int(n) for n in responses]
    batches = [[lengths[i] for i in batch] for batch in plan_micro_batches(lengths, 1, args.budget, HIDDEN)[0]]
    padded = [(len(batch), max(batch)) for batch in batches]
    print(
        f"{sum(lengths)} tokens in {len(batches)} micro-batches, {1 - sum(lengths) / sum(b * s for b, s in padded):.1%} padding"
    )
    times = {
        "padded": (
            sum(seconds(matrices(b * s), args.repeats) for b, s in padded),
            sum(seconds(attention(b, s, None), args.repeats) for b, s in padded),
        ),
        "packed": (
            sum(seconds(matrices(sum(batch)), args.repeats) for batch in batches),
            sum(seconds(attention(1, sum(batch), block_diagonal(batch)), args.repeats) for batch in batches),
        ),
    }
    print(f"{'':8}{'matrices':>10}{'attention':>11}{'layer':>9}   CPU seconds")
    for name, (linear, attended) in times.items():
        print(f"{name:8}{linear:10.3f}{attended:11.3f}{linear + attended:9.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
