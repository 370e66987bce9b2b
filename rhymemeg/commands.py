"""`rhymemeg COMMAND ...`: one entry point for everything that is run by hand.

Each command is a function `main(argv) -> exit status` in a module of its own, imported when it is asked for, so that
`rhymemeg --help` and the commands that need neither torch nor vLLM start at once. Under torchrun use the module itself:
`torchrun ... --module rhymemeg.train`, which is the same as `rhymemeg train` in one process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rhymemeg import __version__


@dataclass(frozen=True)
class Command:
    """`function` of `module` runs it; `summary` is its line in the help."""

    module: str
    summary: str
    function: str = "main"


COMMANDS = {
    "train": Command("rhymemeg.train", "train a model (under torchrun: --module rhymemeg.train)"),
    "doctor": Command(
        "rhymemeg.doctor.command", "check this machine, or every rank (torchrun ... --module rhymemeg.doctor)"
    ),
    "perf": Command("rhymemeg.perf.command", "measure speed, keep results, compare two results or two runs"),
    "convert": Command("rhymemeg.parallel.convert", "weights between Hugging Face folders and Megatron checkpoints"),
    "inspect-checkpoint": Command("rhymemeg.parallel.inspect_checkpoint", "tell what a checkpoint holds and verify it"),
    "report": Command("rhymemeg.report.command", "write one HTML page about a run"),
}


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = ["usage: rhymemeg COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "rhymemeg COMMAND --help tells the options of a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first word; returns its exit status, and 2 for an unknown one."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        import difflib

        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f", did you mean {near[0]}?" if near else f" (known: {', '.join(COMMANDS)})"
        print(f"rhymemeg: error: unknown command {words[0]!r}{hint}", file=sys.stderr)
        return 2
    return int(getattr(importlib.import_module(command.module), command.function)(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
