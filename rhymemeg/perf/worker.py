"""One process of a measurement: `python -m rhymemeg.perf.worker --probes drafter planner --repeats 9 --model FOLDER`.

The probes take turns: each repeat runs every probe once, starting with another one each time, and before each the fixed work
that tells the machine's speed. The garbage collector runs between the repeats and not in them. Prints one line:
`RESULT {"clock": ..., "measures": {name: {"phase": ..., "seconds": [...], "speed": [...]}}}`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence

from rhymemeg.perf.suite import PROBES, Work, context_for, device_context, machine_speed

WARM_UP = 2
"""Repeats at the beginning that are not kept."""


def measure(names: Sequence[str], repeats: int, model: str) -> dict:
    """The result of one process; see the module."""
    probes = [probe for probe in PROBES if probe.name in names]
    context = device_context(model) if any(p.group == "model" for p in probes) else context_for(model)
    works: list[tuple[Work, dict[str, str]]] = [(probe.prepare(context), probe.measures) for probe in probes]
    kept: dict[str, dict] = {
        name: {"phase": phase, "seconds": [], "speed": []} for _, measures in works for name, phase in measures.items()
    }
    gc.collect()
    gc.freeze()
    gc.disable()
    for repeat in range(WARM_UP + repeats):
        turn = repeat % len(works)
        for work, _ in works[turn:] + works[:turn]:
            speed = machine_speed(context_for(model).clock)
            seconds = work()
            gc.collect()
            if repeat >= WARM_UP:
                for name, value in seconds.items():
                    kept[name]["seconds"].append(value)
                    kept[name]["speed"].append(speed)
    gc.enable()
    for close in context.shared.get("close", []):
        close()
    return {"clock": context.clock_name, "measures": kept}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("RESULT " + json.dumps(measure(options.probes, options.repeats, options.model)), flush=True)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
