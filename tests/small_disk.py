"""`rhymemeg.train` in a process that cannot write files of more than 1 MB: a full disk, as far as it can be had without
being root."""

from __future__ import annotations

import resource
import signal
import sys

from rhymemeg.train import main

if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write then fails with EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    sys.exit(main())
