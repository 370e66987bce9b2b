"""Rewards: who judges a response, and how to have it judged safely.

`Scorer` judges samples; `register` adds a reward by name; `known_rewards` lists the names. Importing this package
loads neither torch nor any of the verifiers.
"""

from rhymemeg.rl.rewards.registry import Reward, RewardFunction, known_rewards, register, resolve
from rhymemeg.rl.rewards.scorer import Scorer, component_sums

__all__ = ["Reward", "RewardFunction", "Scorer", "component_sums", "known_rewards", "register", "resolve"]
