"""RhymeMeg: reinforcement learning of large language models with Megatron-core actors, colocated vLLM engines and
rollouts that use the history of earlier epochs.

Importing this package is cheap: neither torch, vLLM nor Megatron is imported until a module that needs it is.
"""

__version__ = "0.1.0"
