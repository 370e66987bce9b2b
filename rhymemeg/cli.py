"""Command line to `Config`: every option of every section as `--its-name`, over a YAML file given with `--config`.

Parsing is tyro's (types, help, nearest names of unknown options); this module only flattens the sections and lays the
command line over the YAML file. Under torchrun every rank parses the same line, so only rank 0 prints.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from typing import Annotated, get_origin

from pydantic import Field, ValidationError

from rhymemeg.config import Config, Section, first_problem, section_types
from rhymemeg.errors import ConfigError


@dataclass(frozen=True)
class DryRun:
    """What `--dry-run` plans for. `gpu_type` "": this machine; `num_gpus` 0: the ranks that torchrun started."""

    gpu_type: str = ""
    num_gpus: int = 0
    mean_response_len: int = 0
    network_gb_per_s: float = 0.0
    json: bool = False


def parse(argv: list[str], prog: str = "python -m rhymemeg.train") -> tuple[Config, DryRun | None]:
    """Return the configuration and, if `--dry-run` was given, what it is for. `--help` and wrong options end the process
    (status 0 and 2) after printing; a bad YAML file or value raises ConfigError."""
    import tyro

    class Invocation(Config):
        """Train a language model by reinforcement learning: Megatron-core actors and vLLM engines in the same ranks.

        Options may also come from a YAML file (--config); the command line wins. Start under torchrun, one process a
        device; see launch/ for ready scripts.
        """

        config: str = Field("", description="YAML file of options, by section or flat.")
        dry_run: bool = Field(False, description="Check everything, print layout, memory and times, and stop.")
        gpu_type: str = Field("", description="With --dry-run: plan for this GPU (h100, ...) without having any.")
        num_gpus: int = Field(
            0, ge=0, le=1 << 20, description="With --dry-run: ranks to plan for; 0: those that were started."
        )
        mean_response_len: int = Field(
            0, ge=0, description="With --dry-run: expected mean response in tokens; 0: guess."
        )
        network_gb_per_s: float = Field(
            0.0, ge=0, description="With --dry-run: a GPU's link to other nodes, GB/s; 0: usual for the GPU type."
        )
        json_plan: bool = Field(False, description="With --dry-run: print the plan as JSON.")

    base = Config.load_yaml(file) if (file := _config_file(argv)) else Config()
    # tyro would make an option of every key of these, and two keys of one name would clash.
    trees = {(section, name): getattr(getattr(base, section), name) for section, name in _trees()}
    default = Invocation(
        **{name: _without_trees(name, getattr(base, name)) for name in Config.model_fields}, config=file
    )
    quiet = os.environ.get("RANK", "0") != "0"
    sink = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            if quiet:
                stack.enter_context(contextlib.redirect_stdout(sink))
                stack.enter_context(contextlib.redirect_stderr(sink))
            given = tyro.cli(
                Annotated[Invocation, tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff],
                args=_bare_flags(argv),
                default=default,
                prog=prog,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from None
    plan = DryRun(given.gpu_type, given.num_gpus, given.mean_response_len, given.network_gb_per_s, json=given.json_plan)
    if plan != DryRun() and not given.dry_run:
        raise ConfigError("--gpu-type, --num-gpus and the like plan a run without starting it: add --dry-run")
    config = Config(**{name: getattr(given, name) for name in Config.model_fields})
    for (section, name), tree in trees.items():
        if not getattr(getattr(config, section), name):
            setattr(getattr(config, section), name, tree)
    return config, plan if given.dry_run else None


def _trees() -> list[tuple[str, str]]:
    """Options, with their sections, that hold names and values of any kind: for YAML files."""
    return [
        (section, name)
        for section, kind in section_types().items()
        for name, field in kind.model_fields.items()
        if get_origin(field.annotation) is dict
    ]


def _without_trees(section: str, options: Section) -> Section:
    return options.model_copy(update={name: {} for of, name in _trees() if of == section})


def _config_file(argv: list[str]) -> str:
    """The value of `--config`, found before the real parsing because it supplies the defaults of the rest."""
    following = [*argv[1:], ""]
    given = [
        value if word == "--config" else word.partition("=")[2]
        for word, value in zip(argv, following)
        if word == "--config" or word.startswith("--config=")
    ]
    if len(given) > 1:
        raise ConfigError(f"--config is given {len(given)} times ({', '.join(given)}); one file is read")
    return given[0] if given else ""


def _bare_flags(argv: list[str]) -> list[str]:
    """A flag without a value means true: `--sequence-parallel` for `--sequence-parallel True`."""
    flags = {"--dry-run", "--json-plan"} | {
        "--" + name.replace("_", "-")
        for section in section_types().values()
        for name, field in section.model_fields.items()
        if field.annotation is bool
    }
    words: list[str] = []
    for i, word in enumerate(argv):
        words.append(word)
        if word.replace("_", "-") in flags and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            words.append("True")
    return words
