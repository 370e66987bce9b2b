"""One HTML page about a run: `tools/report.py RUN [--compare RUN2] -o report.html`, the same as `rhymemeg report`."""

import sys

from rhymemeg.report.command import main

sys.exit(main())
