"""`python -m rhymemeg COMMAND ...`: see `rhymemeg.commands`."""

import sys

from rhymemeg.commands import main

sys.exit(main())
