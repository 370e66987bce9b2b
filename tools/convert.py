"""Hugging Face <-> Megatron checkpoints: see `rhymemeg.parallel.convert`, of which this is the command.

python tools/convert.py to-megatron HF_FOLDER TARGET
python tools/convert.py to-hf CHECKPOINT TARGET [--model HF_FOLDER]
"""

from __future__ import annotations

import sys

from rhymemeg.parallel.convert import main

if __name__ == "__main__":
    sys.exit(main())
