"""Do all ranks have the same? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rhymemeg.doctor.finding import Finding, Level, show_ranks

ENVIRONMENT = ("NCCL_", "TORCH_", "CUDA_", "VLLM_", "OMP_", "PYTORCH_", "UCX_", "GLOO_", "RHYMEMEG_")
"""Beginnings of variables that should be the same everywhere."""
OWN = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "TORCH_NCCL_DUMP")
"""And of those among them that are a rank's or a host's own."""


def compared(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are compared."""
    return {k: v for k, v in environment.items() if k.startswith(ENVIRONMENT) and not k.startswith(OWN)}


def judge(facts: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """`facts[rank]` are flat: name -> value. What most ranks have is taken to be meant; the others are named."""
    found: list[Finding] = []
    for name in sorted({key for rank in facts for key in rank}):
        values = [repr(rank.get(name)) for rank in facts]
        counts = Counter(values)
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        odd = {v: tuple(r for r, value in enumerate(values) if value == v) for v in counts if v != usual}
        parts = [f"{v} on rank {show_ranks(ranks, len(facts))}" for v, ranks in list(odd.items())[:4]]
        more = f" and {len(odd) - 4} other values" if len(odd) > 4 else ""
        level = Level.WARNING if name.startswith("environment") else Level.ERROR
        members = tuple(sorted(r for ranks in odd.values() for r in ranks))
        found.append(Finding(level, "agreement", f"{name} is {usual}, but {', '.join(parts)}{more}", members))
    if not found:
        found.append(Finding(Level.OK, "agreement", f"{len(facts)} ranks agree", tuple(range(len(facts)))))
    return found


def flatten(packages: Mapping[str, Any], gpu: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The facts of one rank that must be those of all others."""
    flat: dict[str, Any] = {key: packages[key] for key in ("python", "kind", "sources", "torch_cuda", "nccl", "index")}
    flat |= {f"package {name}": version for name, version in packages["versions"].items()}
    flat["GPU driver"] = gpu.get("driver")
    flat["GPUs a host"] = [(d["name"], d["memory"]) for d in gpu.get("devices", ())]
    return flat | {f"environment {name}": value for name, value in compared(environment).items()}
