"""`rhymemeg perf`: measure speed, keep results, and say what moved.

    rhymemeg perf run -o now.json                        the quick suite: drafter, planner, sync plan, batching (CPU, a minute)
    rhymemeg perf run --suite model step -o now.json     small model: rollout with and without drafts, training step, weight
                                                         update; whole steps under torchrun
    rhymemeg perf run --against ../before -o now.json    this tree and another one in turns, then compare them at once
    rhymemeg perf record now.json --history perf/        keep a result
    rhymemeg perf compare before.json now.json           two results
    rhymemeg perf compare runs/before runs/now           two run directories (their metrics.jsonl)
    rhymemeg perf compare now.json --history perf/       a result against all kept ones of this machine and suite

Exit status: 0 nothing is slower, 1 something is (with --fail-on moved: or faster), 2 wrong input, 3 a measurement failed.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.observe.files import write_atomically
from rhymemeg.perf import compare as comparing
from rhymemeg.perf import result as results
from rhymemeg.perf.compare import Comparison
from rhymemeg.perf.runs import SKIP
from rhymemeg.perf.statistics import Rule, location


def _rule(options: argparse.Namespace) -> Rule:
    for value, name in ((options.smallest, "--smallest"), (options.sigmas, "--sigmas")):
        if not value > 0:
            raise ConfigError(f"{name} must be greater than 0, got {value:g}")
    return Rule(smallest=options.smallest, sigmas=options.sigmas)


def _tell(comparison: Comparison, options: argparse.Namespace) -> int:
    """Print the table, write what was asked for, return the status."""
    if options.json == "-":
        print(comparing.as_json(comparison), end="")
    else:
        print(comparing.text(comparison))
    for file, content in ((options.json, comparing.as_json), (options.markdown, comparing.markdown)):
        if file and file != "-":
            _write(file, content(comparison))
    return comparison.status(options.fail_on)


def _write(file: str, content: str) -> None:
    try:
        write_atomically(file, content)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def run(options: argparse.Namespace) -> int:
    """`rhymemeg perf run`."""
    from rhymemeg.perf import measure
    from rhymemeg.perf.suite import choose

    try:
        groups = choose(options.suite)
    except ValueError as error:
        raise ConfigError(f"--suite: {error}") from None
    for value, name in ((options.rounds, "--rounds"), (options.repeats, "--repeats"), (options.steps, "--steps")):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 < options.timeout < 1e9:
        raise ConfigError(f"--timeout must be a number of seconds above 0, got {options.timeout:g}")
    model = Path(options.model)
    if not model.is_absolute() and not model.exists():
        model = measure.own_tree() / model
    if set(groups) - {"quick"} and not model.is_dir():
        raise ConfigError(f"--model {options.model}: no such folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes that were started are ended
    settings = measure.Settings(
        groups, options.rounds, options.repeats, str(model), options.steps, timeout=options.timeout
    )
    rule = _rule(options)
    trees = [measure.own_tree()]
    if options.against:
        trees.insert(0, measure.check_tree(Path(options.against)))
    found = measure.run(settings, trees, lambda text: print(text, file=sys.stderr, flush=True))
    for one in found:
        print(_table(one))
    if options.output:
        results.write_result(options.output, found[-1])
        print(f"written: {options.output}")
    if options.against:
        if options.output_against:
            results.write_result(options.output_against, found[0])
        return _tell(comparing.compare_results(found[:1], found[1], rule), options)
    return 0


def _table(found: results.Result) -> str:
    """Locations of a result, and the ratio of rollouts with drafts to those without, which is of one run."""
    typical = {m.name: math.exp(location(m.rounds)) for m in found.measures}
    lines = [f"{found.label or 'this tree'}: {len(found.measures)} measures"]
    for m in found.measures:
        middle = statistics.median(seconds for repeats in m.rounds for seconds in repeats)
        lines.append(
            f"  {m.name:<18} {comparing.seconds(typical[m.name]):>9}{m.unit.removeprefix('s'):<18} {m.clock:<5} "
            f"{len(m.rounds)} x {len(m.rounds[0])}, median {100 * (middle / typical[m.name] - 1):.0f} % above"
        )
    if "rollout.plain" in typical and "rollout.drafted" in typical:
        ratio = typical["rollout.plain"] / typical["rollout.drafted"]
        lines.append(f"  rollout: {ratio:.2f} times as fast with drafts as without")
    return "\n".join(lines)


def record(options: argparse.Namespace) -> int:
    """`rhymemeg perf record`."""
    found = results.read_result(options.result)
    print(f"recorded: {results.record(options.history, found)}")
    return 0


def compare(options: argparse.Namespace) -> int:
    """`rhymemeg perf compare`."""
    rule = _rule(options)
    if options.skip < 0:
        raise ConfigError(f"--skip must be at least 0, got {options.skip}")
    given = [Path(word) for word in options.what]
    for path in given:
        if not path.exists():
            raise ConfigError(f"{path}: no such result or run directory")
    if options.history:
        if len(given) != 1 or given[0].is_dir():
            raise ConfigError("--history compares one result file with the kept ones")
        new = results.read_result(given[0])
        return _tell(comparing.compare_results(results.read_history(options.history, new), new, rule), options)
    if len(given) != 2:
        raise ConfigError("compare needs two results or two run directories, or one result and --history")
    if given[0].is_dir() != given[1].is_dir():
        raise ConfigError(f"{given[0]} and {given[1]}: one is a run directory and the other a result")
    if given[0].is_dir():
        from rhymemeg.observe.read_run import read_run

        a, b = map(read_run, given)
        return _tell(comparing.compare_runs(a, b, rule, options.skip), options)
    a_result, b_result = map(results.read_result, given)
    return _tell(comparing.compare_results([a_result], b_result, rule, options.across_machines), options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="rhymemeg perf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="run|record|compare")
    judged = argparse.ArgumentParser(add_help=False)
    judged.add_argument("--smallest", type=float, default=Rule.smallest, help="relative change that counts (0.025)")
    judged.add_argument("--sigmas", type=float, default=Rule.sigmas, help="standard errors it must exceed (4)")
    judged.add_argument("--fail-on", choices=["slower", "moved"], default="slower", help="what gives status 1")
    judged.add_argument("--json", metavar="FILE", help="also write JSON; '-': print it instead of the table")
    judged.add_argument("--markdown", metavar="FILE", help="also write Markdown")

    one = commands.add_parser("run", parents=[judged], help="measure the suite")
    one.add_argument("--suite", nargs="+", default=["quick"], help="quick, model, step, all, or names of probes")
    one.add_argument("--rounds", type=int, default=5, help="processes of each group (5)")
    one.add_argument("--repeats", type=int, default=25, help="repeats in each process (25)")
    one.add_argument("--steps", type=int, default=12, help="trainer steps a round of `step` (12)")
    one.add_argument("--model", default="launch/quickstart_model", help="Hugging Face folder of the small model")
    one.add_argument("--against", metavar="TREE", help="another source tree, measured in turns with this one")
    one.add_argument("--timeout", type=float, default=900.0, help="seconds that one process may take (900)")
    one.add_argument("-o", "--output", metavar="FILE", help="the result, as JSON")
    one.add_argument("--output-against", metavar="FILE", help="the result of TREE")
    one.set_defaults(function=run)

    two = commands.add_parser("record", help="keep a result in a history")
    two.add_argument("result")
    two.add_argument("--history", default="perf_history", help="folder of kept results (perf_history)")
    two.set_defaults(function=record)

    three = commands.add_parser("compare", parents=[judged], help="compare two results, or two runs")
    three.add_argument("what", nargs="+", help="two results or run directories, reference first")
    three.add_argument("--history", help="folder of kept results to compare one result with")
    three.add_argument("--across-machines", action="store_true", help="compare results of different machines")
    three.add_argument("--skip", type=int, default=SKIP, help=f"steps of a run left out at its beginning ({SKIP})")
    three.set_defaults(function=compare)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    from rhymemeg.perf.measure import MeasurementError

    options = parser().parse_args(argv)
    try:
        return int(options.function(options))
    except RhymeMegError as error:
        print(f"rhymemeg perf: error: {error}", file=sys.stderr)
        return 3 if isinstance(error, MeasurementError) else 2


if __name__ == "__main__":
    sys.exit(main())
