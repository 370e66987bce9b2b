"""`rhymemeg report RUN [--compare RUN2] [-o report.html]`: one HTML page about a run, for any browser, without a network.

RUN is a run directory (it needs metrics.jsonl; windows.jsonl, config.yaml and summary.json are used where they are). The
page is written whole or not at all; without -o it goes to RUN/report.html.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.observe.files import write_atomically
from rhymemeg.observe.read_run import read_run
from rhymemeg.report.page import page


def write_report(folder: str, compare: str | None, output: str | None) -> tuple[Path, int]:
    """Read, draw, write. Returns the file and its size in bytes."""
    run = read_run(folder)
    text = page(run, read_run(compare) if compare else None)
    target = Path(output) if output else run.path / "report.html"
    try:
        write_atomically(target, text)
    except OSError as error:
        raise ConfigError(f"-o {target}: cannot be written: {error.strerror}") from None
    return target, len(text.encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status, 2 for a run that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="rhymemeg report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="run directory")
    parser.add_argument("--compare", metavar="RUN2", help="another run, drawn dashed beside it")
    parser.add_argument("-o", "--output", help="file to write (default: RUN/report.html)")
    options = parser.parse_args(argv)
    try:
        target, size = write_report(options.run, options.compare, options.output)
    except RhymeMegError as error:
        print(f"rhymemeg report: error: {error}", file=sys.stderr)
        return 2
    print(f"{target} ({size / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
