"""One process of a measurement: `python -m rhymemeg.perf.worker --probes drafter planner --model FOLDER`.

It prepares its probes, says `READY {"clock": ..., "phases": {measure: phase}}` on standard output, and then waits for orders on
standard input, one a line: the name of a probe, which it runs once, after the fixed work that tells the machine's speed. It
answers `DONE {"speed": seconds, "seconds": {measure: seconds}}`. The end of the input ends it. The garbage collector runs between
the repeats and not in them. Who has its turn when is up to whoever gives the orders (`rhymemeg.perf.measure`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from typing import IO

from rhymemeg.perf.suite import PROBES, context_for, device_context, machine_speed


def serve(names: Sequence[str], model: str, orders: IO[str], answers: IO[str]) -> None:
    """See the module."""
    probes = [probe for probe in PROBES if probe.name in names]
    context = device_context(model) if any(p.group == "model" for p in probes) else context_for(model)
    speed_clock = context_for(model).clock
    works = {probe.name: probe.prepare(context) for probe in probes}
    phases = {measure: phase for probe in probes for measure, phase in probe.measures.items()}
    gc.collect()
    gc.freeze()
    gc.disable()
    answers.write("READY " + json.dumps({"clock": context.clock_name, "phases": phases}) + "\n")
    answers.flush()
    for line in orders:
        speed = machine_speed(speed_clock)
        seconds = works[line.strip()]()
        gc.collect()
        answers.write("DONE " + json.dumps({"speed": speed, "seconds": seconds}) + "\n")
        answers.flush()
    for close in context.shared.get("close", []):
        close()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status. What libraries print goes to standard error, the answers alone to standard
    output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", nargs="+", required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(options.probes, options.model, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
