"""`python -m rhymemeg.doctor`."""

import sys

from rhymemeg.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
