"""What the planner knows about a GPU. Pure data.

Figures are those of the makers' data sheets (dense BF16, no sparsity; bandwidths of one direction), memory is what the
driver reports for the whole device. `network` is the share of a node's network that one GPU gets in the usual 8-GPU
server with a card a GPU; `--network-gb-per-s` overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymemeg.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """`memory` in bytes, `flops` a second in BF16, bandwidths in bytes a second: of the memory, of one GPU to others of
    its node, of one GPU to other nodes."""

    name: str
    memory: int
    flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network: float
    gpus_a_node: int = 8


def _gpu(name: str, mib: int, tflops: float, tb: float, node: float, network: float) -> Gpu:
    return Gpu(name, mib << 20, tflops * 1e12, tb * 1e12, node * 1e9, network * 1e9)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 40_960, 312, 1.555, 300, 25),
        _gpu("a100", 81_920, 312, 2.039, 300, 25),
        _gpu("h20", 97_871, 148, 4.0, 450, 50),
        _gpu("h800", 81_559, 989, 3.35, 200, 50),
        _gpu("h100", 81_559, 989, 3.35, 450, 50),
        _gpu("h200", 143_771, 989, 4.8, 450, 50),
        _gpu("b200", 183_359, 2_250, 7.7, 900, 50),
    )
}
"""By the name that `--gpu-type` takes (SXM models)."""


def gpu_type(name: str) -> Gpu:
    """The GPU of this name. ConfigError lists the known ones."""
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu-type: {name!r} is not known (known: {', '.join(GPUS)})")
    return GPUS[name.lower()]
