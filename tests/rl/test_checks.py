"""Contradictions between the options of an algorithm: each is refused with the options named."""

from __future__ import annotations

from typing import Any

import pytest

from rhymemeg.errors import ConfigError
from tests.test_config import valid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_estimator": "rloo", "n_samples_per_prompt": 1}, "--advantage-estimator rloo compares samples"),
        ({"advantage_estimator": "reinforce_pp", "dynamic_sampling": True, "n_samples_per_prompt": 1}, "always equal"),
        ({"dynamic_sampling": True, "histopipe_carry": 0.1}, "--dynamic-sampling with --histopipe-carry 0.1"),
        ({"overlong_buffer_len": 65}, "--overlong-buffer-len 65 exceeds --max-response-len 64"),
        ({"eps_clip_c": 3.0, "policy_loss": "cispo"}, "--eps-clip-c is the dual clip of --policy-loss ppo_clip"),
        ({"rollout_is": "token", "old_log_probs": "engine"}, "--rollout-is token weights by pi_old / pi_engine"),
        ({"rollout_is": "token", "top_p": 0.9}, "--rollout-is token with --top-p"),
        ({"rollout_rs": "sequence", "top_k": 5}, "--rollout-rs sequence with --top-k"),
        ({"rollout_token_veto_threshold": 1e-4, "top_k": 5}, "--rollout-token-veto-threshold with --top-k"),
        ({"decoupled_ppo": True, "old_log_probs": "engine"}, "--decoupled-ppo takes the ratio to the actor"),
        ({"rollout_is_bound": "icepop"}, "--rollout-is-bound icepop has no effect without --rollout-is"),
        (
            {"rollout_is": "token", "rollout_is_bound": "icepop", "rollout_is_threshold_lower": 2.0},
            "--rollout-is-threshold-lower 2.0 is not below",
        ),
        ({"kl_coef": 0.1, "kl_loss_coef": 0.1}, "choose one"),
        ({"gamma": 0.9}, "--gamma has no effect with --advantage-estimator grpo"),
        ({"lam": 0.9, "advantage_estimator": "reinforce_pp"}, "--lam has no effect"),
        ({"reward_range": [1.0, 0.0]}, "--reward-range 1 0: the first must be smaller"),
        ({"rewards": {"*": ["ledger"]}, "reward": "ledger"}, "--reward and rewards are both given"),
        ({"rewards": {"*": ["ledger"]}, "reward_args": {"a": 1}}, "reward_args and rewards are both given"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        valid(**changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_is": "sequence", "rollout_is_bound": "mask", "rollout_rs": "geometric", "decoupled_ppo": True},
        {"rollout_rs": "sequence", "old_log_probs": "engine"},
        {"kl_coef": 0.1, "ref_hf_checkpoint": "x", "advantage_estimator": "reinforce_pp", "gamma": 0.9},
        {"dynamic_sampling": True, "overlong_buffer_len": 64, "overlong_filtering": True, "eps_clip_high": 0.28},
        {"advantage_estimator": "reinforce_pp", "n_samples_per_prompt": 1},
    ],
)
def test_what_goes_together(changes: dict[str, Any]) -> None:
    valid(**changes).check()
