"""What a checkpoint holds, and whether it is whole. Needs neither a GPU nor Megatron.

    rhymemeg inspect-checkpoint FOLDER [--tensors] [--no-verify]

FOLDER is a checkpoint, or a folder of them (each is looked at). Exit status 0: whole; 1: damaged, with one line a problem;
2: no checkpoint there. `--no-verify` reads sizes and the table of contents only, not every byte.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rhymemeg.errors import CheckpointError
from rhymemeg.parallel.checkpoint_files import (
    MANIFEST,
    STATE,
    FileFacts,
    piece_names,
    piece_owner,
    read_json,
    read_manifest,
    verify,
)


def report(folder: Path, verify_bytes: bool = True, list_tensors: bool = False) -> tuple[list[str], list[str]]:
    """What there is to say of one checkpoint, and what is wrong with it."""
    said, wrong = [f"{folder}"], []
    try:
        files, state = read_manifest(folder), read_json(folder / STATE)
    except CheckpointError as error:
        return said, [str(error)]
    said += _describe(state)
    said += _files(folder, files)
    # One file after the other, so that every damaged one is named.
    for name, facts in files.items():
        try:
            verify(folder, {name: facts}, checksums=verify_bytes)
        except CheckpointError as error:
            wrong.append(str(error))
    unlisted = sorted(p.name for p in folder.iterdir() if p.name not in files and p.name != MANIFEST)
    wrong += [f"{folder / name} is not in the manifest" for name in unlisted]
    try:
        said += _tensors(folder, files, list_tensors, wrong)
    except CheckpointError as error:
        wrong.append(str(error))
    return said, wrong


def _describe(state: dict[str, Any]) -> list[str]:
    model, extra = state.get("model", {}), state.get("extra_state", {})
    lines = [f"  format {state.get('format')}, {model.get('architecture', state.get('architecture'))}"]
    if "num_parameters" in state:
        lines[0] += f", {state['num_parameters']:,} parameters in {model.get('params_dtype')}"
    if isinstance(extra, dict) and "step" in extra:
        lines.append(f"  {extra['step']} steps done, {state.get('updates')} optimizer updates")
    if isinstance(state.get("layout"), dict):
        sizes = {k: v for k, v in state["layout"].items() if k.endswith("_size") and v not in (1, None)}
        lines.append(f"  saved by {state.get('world_size')} ranks, layout {json.dumps(sizes)}")
    if isinstance(state.get("versions"), dict):
        lines.append("  versions: " + ", ".join(f"{k} {v}" for k, v in state["versions"].items()))
    return lines


def _files(folder: Path, files: dict[str, FileFacts]) -> list[str]:
    size = sum(facts.size for facts in files.values())
    lines = [f"  {len(files)} files, {size / 2**20:,.1f} MiB"]
    for name in piece_names(folder):
        mine = [(piece_owner(f), facts.size) for f, facts in files.items() if f.endswith(f".{name}")]
        ranks = [rank for rank, _ in mine if rank is not None]
        lines.append(f"  piece {name!r} of {len(ranks)} ranks, {sum(size for _, size in mine):,} bytes")
    return lines


def _tensors(folder: Path, files: dict[str, FileFacts], list_all: bool, wrong: list[str]) -> list[str]:
    from rhymemeg.parallel.torch_dist import read_table, tensors_of  # torch imports slowly

    table = read_table(folder)
    tensors = tensors_of(folder, table)
    for index, record in (table.storage_data or {}).items():
        facts = files.get(record.relative_path)
        if facts is None or record.offset + record.length > facts.size:
            wrong.append(f"{folder}: {index.fqn} is not whole in {record.relative_path}")
    kinds = Counter(
        "optimizer." + name.split(".")[2] if name.startswith("optimizer.state.") else "model" for name in tensors
    )
    lines = ["  tensors: " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))]
    if list_all:
        for name, entry in sorted(tensors.items()):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            lines.append(f"    {name}  {dtype} {list(entry.size)} in {len(entry.chunks)} chunks")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="rhymemeg inspect-checkpoint", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--no-verify", action="store_true", help="do not read every byte")
    options = parser.parse_args(argv)
    folder: Path = options.folder
    found = [folder] if (folder / STATE).exists() or (folder / MANIFEST).exists() else []
    if not found and folder.is_dir():
        found = sorted(p for p in folder.iterdir() if (p / STATE).exists() or (p / MANIFEST).exists())
    if not found:
        print(f"rhymemeg: error: {folder} holds no checkpoint", file=sys.stderr)
        return 2
    damaged = False
    for checkpoint in found:
        said, wrong = report(checkpoint, not options.no_verify, options.tensors)
        print("\n".join(said))
        print("\n".join(f"  DAMAGED: {problem}" for problem in wrong) if wrong else "  whole")
        damaged = damaged or bool(wrong)
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main())
