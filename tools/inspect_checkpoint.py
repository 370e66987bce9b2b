"""What a checkpoint holds, and whether it is whole: see `rhymemeg.parallel.inspect_checkpoint`, of which this is the command.

python tools/inspect_checkpoint.py FOLDER [--tensors] [--no-verify]
"""

from __future__ import annotations

import sys

from rhymemeg.parallel.inspect_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
