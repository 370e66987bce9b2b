"""Shared by all tests: one thread a process, no network, Hugging Face libraries offline."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")
