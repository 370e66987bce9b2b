"""Builds the C++ draft index and declares what `pyproject.toml` cannot: an extension module found by its sources."""

from __future__ import annotations

import re
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "rhymemeg/__init__.py").read_text()).group(1)


def pins(name: str) -> list[str]:
    """The pinned requirements of requirements/<name>.txt."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


SOURCES = sorted(glob("rhymemeg/histospec/csrc/*.cc"))

setup(
    name="rhymemeg",
    version=VERSION,
    description="Reinforcement learning of LLMs with Megatron-core actors, colocated vLLM engines and history-aware rollouts",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["rhymemeg", "rhymemeg.*"]),
    package_data={"rhymemeg.histospec": ["csrc/*.h", "*.pyi"]},
    # The weights-and-engines stack is an extra because CPU and GPU builds exclude each other.
    install_requires=["numpy", "pydantic>=2.12", "pyyaml", "rich", "tyro>=1.0"],
    extras_require={"cpu": pins("cpu"), "gpu": pins("gpu"), "dev": pins("dev")},
    ext_modules=(
        [Pybind11Extension("rhymemeg.histospec._index", SOURCES, cxx_std=17, extra_compile_args=["-O3", "-g0"])]
        if SOURCES
        else []
    ),
    entry_points={
        "console_scripts": ["rhymemeg=rhymemeg.commands:main"],
        "vllm.general_plugins": ["rhymemeg=rhymemeg.rollout.plugin:register"],
    },
)
