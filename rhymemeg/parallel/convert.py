"""Weights between a Hugging Face folder and a Megatron-core distributed checkpoint, both ways, without starting either.

    rhymemeg convert to-megatron HF_FOLDER TARGET
    rhymemeg convert to-hf CHECKPOINT TARGET [--model HF_FOLDER]

One tensor is in memory at a time, and files are cut at `--max-file-gib`; values are copied, never computed with, so there
and back again is the same bit for bit. What belongs where comes from the layout tables of weight sync (`ModelLayout`), for
every family that they know.

`to-megatron` writes the model's tensors under Megatron's names, to be loaded under any layout: layers stacked along a first
axis, in a MoE model each layer by its own name, experts stacked. `to-hf` reads such a folder or a checkpoint of a run
(which holds the optimizer, too; that is left alone) under either spelling of the norms. Configuration and tokenizer come
from `--model`, by default the model folder that the checkpoint names.

The target appears whole or not at all; one that exists is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.errors import CheckpointError, ConfigError, RhymeMegError
from rhymemeg.parallel.checkpoint_files import (
    STATE,
    FileFacts,
    checksum,
    read_json,
    read_manifest,
    sync,
    verify,
    write_manifest,
)
from rhymemeg.parallel.torch_dist import TensorReader, TensorWriter
from rhymemeg.weight_sync.boxes import Box, Shape, numel, slices, whole
from rhymemeg.weight_sync.deepseek import describe
from rhymemeg.weight_sync.hf_files import SINGLE, HfFolder, copy_companions, write_index
from rhymemeg.weight_sync.layouts import FUSED_NORMS, ModelLayout, Parameter
from rhymemeg.weight_sync.rules import Vocabulary

GIB = 1 << 30
_FUSED = {separate: fused for fused, separate in FUSED_NORMS.items()}


class Place(NamedTuple):
    """Where a parameter lies in a Megatron checkpoint: at `at` along the first axes of a tensor, which have the sizes
    `stacked`."""

    key: str
    at: tuple[int, ...]
    stacked: Shape

    def box(self, shape: Shape) -> Box:
        """The parameter's box in the tensor, for a parameter of this shape."""
        return (*((i, i + 1) for i in self.at), *whole(shape))


class MegatronNames:
    """Names and places of a model's parameters in Megatron's checkpoints."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout, self.arch = layout, layout.arch
        self.parameters = {p.name: p for p in layout.parameters()}

    def place(self, p: Parameter, fused: bool | None = None, by_layer: bool | None = None) -> Place:
        """`fused`: a norm goes by the name of the linear layer after it, by default where there is such a layer. `by_layer`:
        each layer has tensors of its own, by default in a model with experts."""
        if p.layer is None:
            return Place(p.name, (), ())
        suffix = p.name.split(".", 3)[3]
        if p.expert is not None:
            suffix = suffix.replace(f"local_experts.{p.expert}.", "experts.", 1)
        elif suffix in _FUSED:
            linear = _FUSED[suffix].removesuffix(".layer_norm_weight") + ".weight"
            if fused is None:
                fused = f"decoder.layers.{p.layer}.{linear}" in self.parameters
            suffix = _FUSED[suffix] if fused else suffix
        axes = [] if p.expert is None else [(p.expert, self.arch.num_experts)]
        if self.arch.is_moe if by_layer is None else by_layer:
            key = f"decoder.layers.{p.layer}.{suffix}"
        else:
            key, axes = f"decoder.layers.{suffix}", [(p.layer, self.arch.num_layers), *axes]
        return Place(key, tuple(i for i, _ in axes), tuple(n for _, n in axes))

    def find(self, p: Parameter, known: Callable[[str], bool]) -> Place:
        """Its place in a checkpoint of which `known` tells the keys. Raises CheckpointError naming the parameter."""
        for by_layer in (None, not self.arch.is_moe):
            for fused in (None, True, False):
                place = self.place(p, fused, by_layer)
                if known(place.key):
                    return place
        raise CheckpointError(f"the checkpoint lacks {self.place(p).key}")


# ----------------------------------------------------------------------------------------------------------- to Megatron


def to_megatron(source: Path, target: Path, max_file_bytes: int = 4 * GIB, vocabulary_multiple: int = 128) -> int:
    """Returns the number of parameters written. The vocabulary is padded to a multiple, as Megatron's layers want it."""
    arch = _arch_of(source)
    layout = ModelLayout(arch)
    names = MegatronNames(layout)
    padded = -(-arch.vocab_size // vocabulary_multiple) * vocabulary_multiple
    with _Aside(target) as aside, HfFolder(source) as files:
        shapes = layout.hf_tensors()
        files.require(shapes)
        writer = TensorWriter(aside, max_file_bytes)
        count = 0
        for p in names.parameters.values():
            values = _fused(p, layout, files, shapes, padded)
            place = names.place(p)
            shape = (*place.stacked, *values.shape)
            offsets = (*place.at, *(0 for _ in values.shape))
            writer.add(place.key, shape, offsets, values.view((*(1 for _ in place.at), *values.shape)))
            count += values.numel()
        written = writer.close()
        state = {"format": "weights", "architecture": arch.architecture, "hf_checkpoint": str(source.resolve())}
        (aside / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        write_manifest(aside, {n: FileFacts(sync(aside / n), checksum(aside / n)) for n in (*written, STATE)})
    return count


def _fused(p: Parameter, layout: ModelLayout, files: HfFolder, shapes: dict[str, Shape], padded: int) -> Tensor:
    """The parameter as one rank without tensor parallelism would hold it."""
    rows = padded if isinstance(p.rule, Vocabulary) else 0
    result: Tensor | None = None
    for piece in layout.pieces(p.name, 0, 1, 0, 1, rows):
        (values,) = files.read(piece.hf_name, shapes[piece.hf_name], [piece.hf_box])
        if result is None:
            result = torch.zeros(layout.local_shape(p.name, 1, 1, rows), dtype=values.dtype)
        elif result.dtype != values.dtype:
            raise CheckpointError(
                f"{files.folder}: {piece.hf_name} is {values.dtype}, but is fused with {result.dtype}"
            )
        result[slices(piece.local_box)] = values
    assert result is not None
    return result


# --------------------------------------------------------------------------------------------------------------- to HF


def to_hf(source: Path, target: Path, model: Path | None = None, max_file_bytes: int = 4 * GIB) -> int:
    """Returns the number of parameters written. The checkpoint's files are verified first."""
    verify(source, read_manifest(source))
    model = model or _model_of(source)
    arch = _arch_of(model)
    layout = ModelLayout(arch)
    names, reader = MegatronNames(layout), TensorReader(source)
    places = {p.name: names.find(p, reader.tensors.__contains__) for p in names.parameters.values()}
    sizes = {
        p.hf_name(part): numel(whole(part.shape)) * reader.tensors[places[p.name].key].properties.dtype.itemsize
        for p in names.parameters.values()
        for part in p.rule.parts
    }
    file_of = _cut(sizes, max_file_bytes)
    with _Aside(target) as aside:
        content: dict[str, Tensor] = {}
        for name, values in _unfused(names, layout, reader, places):
            if content and file_of[name] != file_of[next(iter(content))]:
                content = _write_file(content, aside, file_of)
            content[name] = values
        _write_file(content, aside, file_of)
        if len(set(file_of.values())) > 1:
            write_index(aside, file_of, sum(sizes.values()))
        dtype = reader.tensors["embedding.word_embeddings.weight"].properties.dtype
        copy_companions(model, aside, dtype)
    return arch.num_parameters()


def _arch_of(folder: Path) -> ModelArch:
    """The model of a Hugging Face folder, of any family that has a layout table (also those that cannot be trained yet)."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no model: {file} is missing") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    return describe(config, str(file))


def _model_of(source: Path) -> Path:
    """The Hugging Face folder that a checkpoint names."""
    state: dict[str, Any] = read_json(source / STATE)
    named = state.get("hf_checkpoint")
    with_run = state.get("extra_state")
    if named is None and isinstance(with_run, dict):
        named = with_run.get("config", {}).get("model", {}).get("hf_checkpoint")
    if not named or not Path(named).is_dir():
        raise CheckpointError(f"{source} names no model folder that is there ({named}); give --model")
    return Path(named)


def _unfused(
    names: MegatronNames, layout: ModelLayout, reader: TensorReader, places: dict[str, Place]
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors, one after the other."""
    for p in names.parameters.values():
        place = places[p.name]
        there = tuple(reader.tensors[place.key].size)
        shape = there[len(place.at) :]
        vocabulary = isinstance(p.rule, Vocabulary)
        expected = layout.local_shape(p.name, 1, 1, shape[0] if vocabulary else 0)
        if shape != expected or (vocabulary and shape[0] < layout.arch.vocab_size):
            raise CheckpointError(f"{reader.folder}: {place.key} is {list(there)}, the model has {list(expected)}")
        values = reader.read(place.key, place.box(shape)).view(shape)
        parts = {p.hf_name(part): torch.empty(part.shape, dtype=values.dtype) for part in p.rule.parts}
        for piece in layout.pieces(p.name, 0, 1, 0, 1, shape[0] if vocabulary else 0):
            parts[piece.hf_name][slices(piece.hf_box)] = values[slices(piece.local_box)]
        yield from parts.items()


def _cut(sizes: dict[str, int], max_file_bytes: int) -> dict[str, str]:
    """Tensor -> file, files of at most this size in the order of the tensors (a larger tensor alone)."""
    number, size, numbers = 1, 0, {}
    for name, n in sizes.items():
        if size and size + n > max_file_bytes:
            number, size = number + 1, 0
        size += n
        numbers[name] = number
    if number == 1:
        return dict.fromkeys(sizes, SINGLE)
    return {name: f"model-{k:05d}-of-{number:05d}.safetensors" for name, k in numbers.items()}


def _write_file(content: dict[str, Tensor], folder: Path, file_of: dict[str, str]) -> dict[str, Tensor]:
    file = folder / file_of[next(iter(content))]
    save_file(content, file, metadata={"format": "pt"})
    sync(file)
    return {}


# -------------------------------------------------------------------------------------------------------------- common


class _Aside:
    """A folder beside the target, renamed to it at the end and removed after an error."""

    def __init__(self, target: Path) -> None:
        self.target, self.aside = target, target.with_name(f".{target.name}.writing")

    def __enter__(self) -> Path:
        if self.target.exists():
            raise CheckpointError(f"{self.target} exists; nothing is overwritten")
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.mkdir(parents=True)
        return self.aside

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            sync(self.aside)
            os.replace(self.aside, self.target)
            sync(self.target.parent)
        else:
            shutil.rmtree(self.aside, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Status 0, or 1 after one message."""
    parser = argparse.ArgumentParser(prog="rhymemeg convert", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("to-megatron", "a Hugging Face folder"), ("to-hf", "a Megatron checkpoint")):
        command = commands.add_parser(name, help=f"convert {words}")
        command.add_argument("source", type=Path, help=words)
        command.add_argument("target", type=Path, help="folder to write; must not exist")
        command.add_argument("--max-file-gib", type=float, default=4.0, help="largest file (default 4)")
        if name == "to-hf":
            command.add_argument("--model", type=Path, help="Hugging Face folder with configuration and tokenizer")
        else:
            command.add_argument("--make-vocab-size-divisible-by", type=int, default=128, help="padding (default 128)")
    options = parser.parse_args(argv)
    limit = int(options.max_file_gib * GIB)
    try:
        if options.command == "to-hf":
            count = to_hf(options.source, options.target, options.model, limit)
        else:
            count = to_megatron(options.source, options.target, limit, options.make_vocab_size_divisible_by)
    except (RhymeMegError, OSError) as error:
        print(f"rhymemeg: error: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: {count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
